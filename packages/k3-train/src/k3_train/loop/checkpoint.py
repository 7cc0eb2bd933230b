"""Checkpoints of a run: one folder per step, complete or absent, never pickled.

`checkpoints/step-00000120/{state.safetensors, meta.json}`. A folder is written under another
name, flushed, and renamed, so that an interrupted save leaves nothing that looks like a checkpoint.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from k3_core.errors import K3Error

_PREFIX = "step-"
_UNFINISHED = ".unfinished-"


class CheckpointError(K3Error):
    """A checkpoint that is absent or does not fit the model."""


def save(root: Path, step: int, tensors: Mapping[str, Tensor], meta: dict, keep: int) -> Path:
    """Write the checkpoint of `step` and drop all but the newest `keep`; returns its folder."""
    root.mkdir(parents=True, exist_ok=True)
    for leftover in root.glob(_UNFINISHED + "*"):
        shutil.rmtree(leftover)
    final = root / f"{_PREFIX}{step:08d}"
    partial = root / f"{_UNFINISHED}{final.name}"
    partial.mkdir()
    cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(cpu, partial / "state.safetensors")
    (partial / "meta.json").write_text(json.dumps({"step": step, **meta}, indent=1))
    for path in (*partial.iterdir(), partial):
        _flush(path)
    if final.exists():
        shutil.rmtree(final)
    partial.rename(final)
    _flush(root)
    for old in _folders(root)[:-keep]:
        shutil.rmtree(old)
    return final


def newest(root: Path) -> Path:
    """The folder of the newest checkpoint; CheckpointError when there is none."""
    folders = _folders(root)
    if not folders:
        raise CheckpointError(
            f"{root} holds no checkpoint; the run did not reach one, start it with `k3 train fit`"
        )
    return folders[-1]


def load(folder: Path) -> tuple[dict[str, Tensor], dict]:
    """Tensors (on the CPU) and metadata of one checkpoint."""
    return load_file(folder / "state.safetensors"), json.loads((folder / "meta.json").read_text())


def _folders(root: Path) -> list[Path]:
    return sorted(root.glob(_PREFIX + "*"))


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
