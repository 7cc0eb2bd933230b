"""Write checkpoint files: staged under temporary names, streamed, split into shards."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from k3_core.config.manifest import DTYPE_BYTES

from .folder import INDEX, WEIGHTS
from .headers import LENGTH_BYTES
from .tensors import TORCH_DTYPES, write_tensor

_WEIGHT_FILES = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor on its way to a file: `shape` and `dtype` (a safetensors code) as stored."""

    name: str
    tensor: Tensor
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class Staging:
    """Files of a folder that appear together: renamed when the block ends without an error."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._names: list[str] = []

    def __enter__(self) -> Staging:
        self.folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        for name in self._names:
            if kind is None:
                os.replace(self._partial(name), self.folder / name)
            else:
                self._partial(name).unlink(missing_ok=True)

    def new(self, name: str) -> Path:
        """The temporary path to write file `name` to."""
        self._names.append(name)
        return self._partial(name)

    def write_json(self, name: str, value: object) -> None:
        """Write a JSON file."""
        text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
        self.new(name).write_text(text, encoding="utf-8")

    def copy(self, source: Path | None, name: str) -> bool:
        """Copy a file of another folder; False when there is none."""
        if source is None or not (source / name).is_file():
            return False
        shutil.copyfile(source / name, self.new(name))
        return True

    def _partial(self, name: str) -> Path:
        return self.folder / f".{name}.partial"


def write_weights(
    staging: Staging, stored: Sequence[StoredTensor], limit: int, metadata: Mapping[str, str]
) -> list[str]:
    """Stage one file, or shards of at most `limit` bytes and their index; return the names."""
    shards = _shards(stored, limit)
    count = len(shards)
    if count == 1:
        _write_file(staging.new(WEIGHTS), shards[0], metadata)
        return [WEIGHTS]
    names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    weight_map: dict[str, str] = {}
    for name, shard in zip(names, shards, strict=True):
        _write_file(staging.new(name), shard, metadata)
        weight_map.update(dict.fromkeys((one.name for one in shard), name))
    total = sum(one.num_bytes for one in stored)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    staging.write_json(INDEX, index)
    return [*names, INDEX]


def remove_stale(folder: Path, kept: Sequence[str]) -> None:
    """Delete weight files of an earlier save that the new one has not replaced."""
    for file in folder.iterdir():
        if _WEIGHT_FILES.fullmatch(file.name) and file.name not in kept:
            file.unlink()


def _shards(stored: Sequence[StoredTensor], limit: int) -> list[list[StoredTensor]]:
    """Consecutive tensors up to `limit` bytes; a larger tensor is a shard of its own."""
    shards: list[list[StoredTensor]] = [[]]
    size = 0
    for one in stored:
        if shards[-1] and size + one.num_bytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(one)
        size += one.num_bytes
    return shards


def _write_file(file: Path, shard: Sequence[StoredTensor], metadata: Mapping[str, str]) -> None:
    """Wider dtypes first, then by name: the order of the safetensors library keeps alignment."""
    ordered = sorted(shard, key=lambda one: (-DTYPE_BYTES[one.dtype], one.name))
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    position = 0
    for one in ordered:
        offsets = [position, position + one.num_bytes]
        header[one.name] = {"dtype": one.dtype, "shape": one.shape, "data_offsets": offsets}
        position += one.num_bytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % LENGTH_BYTES)
    with file.open("wb") as stream:
        stream.write(len(raw).to_bytes(LENGTH_BYTES, "little"))
        stream.write(raw)
        for one in ordered:
            write_tensor(stream, one.tensor, TORCH_DTYPES[one.dtype])
            missing = math.prod(one.shape) - one.tensor.numel()
            stream.write(bytes(missing * DTYPE_BYTES[one.dtype]))  # the zero tail of A_log
