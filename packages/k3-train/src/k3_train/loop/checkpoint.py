"""Checkpoints of a run: one folder per step, complete or absent, never pickled.

`checkpoints/step-00000120/{manifest.json, state/*.safetensors}`, written and read with
`torch.distributed.checkpoint`. Its usual files hold pickled metadata; its safetensors storage does
not: what it needs to put shards together is in their headers. The folder is written under another
name, its manifest last, flushed, and renamed: an interrupted save leaves nothing that looks like a
checkpoint, and the older ones go after that.
"""

import json
import os
import re
import shutil
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

from k3_core.errors import K3Error
from k3_train.file_hash import file_sha256

FORMAT = "k3-checkpoint/1"
MANIFEST = "manifest.json"
SHARD_BYTES = 1 << 30
"""A shard is put together in memory before it is written; this bounds it."""
_STATE = "state"
_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_UNFINISHED = ".unfinished-"

# One process is what is meant.
warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)


class CheckpointError(K3Error):
    """A checkpoint that is absent, cannot be written, is damaged or does not fit the model."""


def save(root: Path, step: int, tensors: Mapping[str, Tensor], meta: dict, keep: int) -> Path:
    """Write the checkpoint of `step` and drop all but the newest `keep`; returns its folder.

    CheckpointError when it cannot be written: nothing of it stays, the older ones are untouched.
    """
    needed = sum(tensor.nbytes for tensor in tensors.values())
    partial = root / f"{_UNFINISHED}step-{step:08d}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        for leftover in root.glob(_UNFINISHED + "*"):
            shutil.rmtree(leftover)
        free = shutil.disk_usage(root).free
        if free < needed:
            raise OSError(f"it needs {needed:,} bytes, {free:,} are free")
        _write(partial, tensors, {"step": step, **meta})
        final = _free_name(root, step)
        partial.rename(final)
        _flush(root)
    except (dcp.CheckpointException, OSError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(
            f"the checkpoint of step {step} was not saved in {root}: {_cause(error)}; those that "
            "were there are untouched: make room or set run.keep_checkpoints lower"
        ) from error
    _drop_old(root, keep)
    return final


def newest(root: Path) -> Path:
    """The folder of the newest checkpoint; CheckpointError when there is none."""
    folders = _folders(root)
    if not folders:
        raise CheckpointError(
            f"{root} holds no checkpoint; the run did not reach one, start it with `k3 train fit`"
        )
    return folders[-1]


def load(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors (on the CPU) and metadata of one checkpoint; CheckpointError when it is damaged."""
    if (folder / "state.safetensors").is_file():  # written before there was a manifest
        meta = json.loads((folder / "meta.json").read_text())
        return load_file(folder / "state.safetensors"), meta
    if not (folder / MANIFEST).is_file():
        raise CheckpointError(f"{folder} is not a checkpoint: it has no {MANIFEST}")
    manifest = json.loads((folder / MANIFEST).read_text())
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder} has the format {manifest.get('format')!r}, this version reads {FORMAT!r}"
        )
    for name, expected in manifest["files"].items():
        if not (folder / name).is_file() or _describe(folder / name) != expected:
            raise CheckpointError(
                f"{folder / name} is missing, cut off or changed: its manifest says {expected}; "
                "remove the folder to resume from an older checkpoint"
            )
    reader = HuggingFaceStorageReader(str(folder / _STATE))
    entries: Mapping[str, Any] = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
    }
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors, manifest["meta"]


def _write(folder: Path, tensors: Mapping[str, Tensor], meta: dict) -> None:
    folder.mkdir()
    state = folder / _STATE
    writer = HuggingFaceStorageWriter(str(state), fqn_to_index_mapping=_shards(tensors))
    dcp.save(dict(tensors), storage_writer=writer, no_dist=True)
    files = {str(path.relative_to(folder)): _describe(path) for path in sorted(state.iterdir())}
    manifest = {"format": FORMAT, "meta": meta, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    for path in (*state.iterdir(), state, folder / MANIFEST, folder):
        _flush(path)


def _shards(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Number of the file of each tensor, from 1."""
    shards, index, size = {}, 1, 0
    for name, tensor in tensors.items():
        if size and size + tensor.nbytes > SHARD_BYTES:
            index, size = index + 1, 0
        size += tensor.nbytes
        shards[name] = index
    return shards


def _describe(path: Path) -> dict[str, int | str]:
    return {"bytes": path.stat().st_size, "sha256": file_sha256(path)}


def _free_name(root: Path, step: int) -> Path:
    """A step that is saved again gets a name beside the first, which goes once that is there."""
    names = [f"step-{step:08d}", *(f"step-{step:08d}.{again}" for again in range(1, 100))]
    return next(root / name for name in names if not (root / name).exists())


def _drop_old(root: Path, keep: int) -> None:
    by_step = {_order(folder)[0]: folder for folder in _folders(root)}
    kept = set(list(by_step.values())[-keep:])
    for folder in _folders(root):
        if folder not in kept:
            # By renaming first: a folder that is half gone must not look like a checkpoint.
            doomed = folder.rename(root / f"{_UNFINISHED}old-{folder.name}")
            shutil.rmtree(doomed, ignore_errors=True)  # the next save tries again


def _folders(root: Path) -> list[Path]:
    found: Iterable[Path] = root.iterdir() if root.is_dir() else ()
    return sorted((path for path in found if _NAME.fullmatch(path.name)), key=_order)


def _order(folder: Path) -> tuple[int, int]:
    match = _NAME.fullmatch(folder.name)
    assert match is not None
    return int(match[1]), int(match[2] or 0)


def _cause(error: BaseException) -> BaseException:
    """What went wrong in the one process, without the wrapping for many."""
    if isinstance(error, dcp.CheckpointException):
        return next((failure for failure, _ in error.failures.values()), error)
    return error


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
