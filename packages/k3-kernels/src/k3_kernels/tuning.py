"""Launch configurations that `k3 kernels tune` measured on this GPU, read when an op is launched.

An op's table in Python gives its default; `tuned` replaces it by what the user's cache has for the
same op, shape class, device name and version of triton. The cache is one JSON file a device, read
once a process when the first kernel is launched on a GPU, and never at import.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import torch

from k3_core.errors import K3Error

FORMAT = "k3-kernels-tuning-1"

Config = TypeVar("Config")
Shape = tuple[int | str, ...]

SWEEPS = {
    "kda_chunk": "k3_kernels.kda_chunk.sweep:sweeps",
    "kda_step": "k3_kernels.kda_step.sweep:sweeps",
}
"""Ops that can be tuned, and the functions that give their sweeps."""


@dataclass(frozen=True)
class Sweep:
    """One shape class of an op to be tuned.

    shape: as the op asks for it. candidates: configurations of one type, the default first.
    run: launches the op with one of them.
    """

    shape: Shape
    candidates: tuple[Any, ...]
    run: Callable[[Any], object]


@dataclass(frozen=True)
class Entry:
    """What was measured for one shape class: the best configuration, its time and the default's."""

    op: str
    shape: Shape
    config: dict[str, Any]
    microseconds: float
    default_microseconds: float


def tuned(op: str, shape: Shape, default: Config) -> Config:
    """The measured configuration of a shape class on this GPU, else `default`.

    A configuration is a frozen dataclass or a NamedTuple; the found one has the type of `default`.
    Raises K3Error naming the file when the cache cannot be read or does not fit.
    """
    kind: Any = type(default)
    found: Config | None = _lookup(op, shape, kind)
    return default if found is None else found


def cache_folder() -> Path:
    """$K3_CACHE, or k3 in the user's cache folder ($XDG_CACHE_HOME, ~/.cache)."""
    if os.environ.get("K3_CACHE"):
        return Path(os.environ["K3_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "k3"


def cache_file(device_name: str) -> Path:
    """The file of a device, named after it."""
    return cache_folder() / f"kernels-{re.sub(r'[^A-Za-z0-9]+', '-', device_name)}.json"


def triton_version() -> str | None:
    """The version of the triton distribution, or None; triton is not imported."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return None


def read_cache(path: Path, device_name: str) -> list[dict[str, Any]]:
    """The entries of a file, those of other versions of triton too; none when there is no file."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        found, entries = (record["format"], record["device"]), record["entries"]
        for entry in entries:
            _ = entry["op"], entry["triton"], tuple(entry["shape"]), dict(entry["config"])
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise K3Error(
            f"{path} is not a cache of `k3 kernels tune` ({type(error).__name__}: {error}); "
            "delete it, or point K3_CACHE to another folder"
        ) from error
    if found != (FORMAT, device_name):
        raise K3Error(
            f"{path} has format {found[0]!r} for the device {found[1]!r}, expected {FORMAT!r} for "
            f"{device_name!r}; delete it, or point K3_CACHE to another folder"
        )
    return list(entries)


def write_cache(path: Path, device_name: str, measured: Iterable[Entry]) -> None:
    """Merge `measured` into a file; readers see the old file or the new one, whole."""
    triton = triton_version()
    entries = {_key(old): old for old in read_cache(path, device_name)}
    for one in measured:
        new = {**vars(one), "shape": list(one.shape), "triton": triton}
        entries[_key(new)] = new
    record = {"format": FORMAT, "device": device_name, "entries": list(entries.values())}
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", dir=path.parent, prefix=path.name, delete=False
    ) as file:
        file.write(json.dumps(record, indent=1) + "\n")
    os.replace(file.name, path)
    forget()


def forget() -> None:
    """Read the cache again at the next launch."""
    _table.cache_clear()
    _lookup.cache_clear()


def field_names(kind: type) -> tuple[str, ...]:
    """Fields of a configuration type."""
    if is_dataclass(kind):
        return tuple(field.name for field in fields(kind))
    return tuple(kind._fields)  # type: ignore[attr-defined]


def as_fields(config: object) -> dict[str, Any]:
    """A configuration as JSON values."""
    return {name: getattr(config, name) for name in field_names(type(config))}


def device_name() -> str | None:
    """The CUDA device that is current, or None."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _key(entry: dict[str, Any]) -> tuple[object, ...]:
    return entry["op"], entry["triton"], tuple(entry["shape"])


@cache
def _table() -> tuple[Path | None, dict[tuple[object, ...], dict[str, Any]]]:
    name = device_name()
    if name is None:
        return None, {}
    path = cache_file(name)
    return path, {_key(entry): entry["config"] for entry in read_cache(path, name)}


@cache
def _lookup(op: str, shape: Shape, kind: Any) -> Any:
    path, table = _table()
    config = table.get((op, triton_version(), shape)) if table else None
    if config is None:
        return None
    if config.keys() != set(field_names(kind)):
        raise K3Error(
            f"{path}: the configuration of {op} {list(shape)} has {sorted(config)}, this version "
            f"takes {sorted(field_names(kind))}; run `k3 kernels tune --op {op}` again"
        )
    return kind(**config)
