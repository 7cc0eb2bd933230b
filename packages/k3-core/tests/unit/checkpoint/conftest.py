"""Helpers for tests that edit checkpoint folders."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file


class Folder:
    """A writable copy of a golden checkpoint, rewritten by the safetensors library."""

    def __init__(self, source: Path, path: Path) -> None:
        self.path = path
        path.mkdir()
        shutil.copy(source / "config.json", path)
        self.tensors = load_file(source / "model.safetensors")

    def write(self, metadata: dict[str, str] | None = None) -> Path:
        """Write the tensors as they are now."""
        save_file(self.tensors, self.path / "model.safetensors", metadata)
        return self.path

    def set_config(self, **changes: object) -> None:
        """Change fields of the text section."""
        file = self.path / "config.json"
        data = json.loads(file.read_text())
        data.get("text_config", data).update(changes)
        file.write_text(json.dumps(data))


@pytest.fixture
def folder_of(golden, tmp_path):
    return lambda name: Folder(golden(name), tmp_path / name)
