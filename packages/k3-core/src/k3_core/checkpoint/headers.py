"""Headers of safetensors files, read and checked without torch and without mapping the file.

A file is 8 bytes of header length (little endian), a JSON header, then the data; each tensor
names its byte range in the data. A mapped file would count as resident memory, hence plain reads.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3_core.config.manifest import DTYPE_BYTES
from k3_core.errors import K3Error

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000


class CheckpointError(K3Error, ValueError):
    """A checkpoint that cannot be read or does not fit: names the tensor, the file, the remedy."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A stored tensor: `offset` is absolute in `file`, `dtype` a safetensors code."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """What one file holds."""

    metadata: Mapping[str, str]
    entries: Mapping[str, TensorEntry]


def read_header(file: Path) -> Header:
    """Read and check the header of a safetensors file.

    Raises CheckpointError for a file that is not safetensors, is truncated or inconsistent.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
        if size < LENGTH_BYTES or length > size - LENGTH_BYTES or length > MAX_HEADER_BYTES:
            raise _broken(file, f"its {size} bytes do not hold a header of {length} bytes")
        raw = stream.read(length)
    try:
        header = json.loads(raw)
        metadata = header.pop("__metadata__", {})
        start = LENGTH_BYTES + length
        entries = {name: _entry(name, one, file, start) for name, one in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise _broken(file, f"its header cannot be read ({error})") from None
    _check_ranges(file, entries, start, size)
    return Header(metadata, entries)


def _entry(name: str, fields: Mapping[str, Any], file: Path, start: int) -> TensorEntry:
    dtype, shape = sys.intern(fields["dtype"]), tuple(fields["shape"])
    begin, end = fields["data_offsets"]
    if dtype not in DTYPE_BYTES:
        raise CheckpointError(
            f"tensor {name} in {file} has the dtype {dtype!r}, allowed: {', '.join(DTYPE_BYTES)}. "
            "Convert the checkpoint to the released layout"
        )
    if any(type(one) is not int or one < 0 for one in (*shape, begin, end)):
        raise _broken(file, f"tensor {name} has the shape {shape} at bytes {begin} to {end}")
    num_bytes = math.prod(shape) * DTYPE_BYTES[dtype]
    if end - begin != num_bytes:
        raise CheckpointError(
            f"tensor {name} in {file} has {end - begin} bytes, its shape {shape} in {dtype} needs "
            f"{num_bytes}. Download or export the file again"
        )
    return TensorEntry(name, dtype, shape, file, start + begin, num_bytes)


def _check_ranges(file: Path, entries: Mapping[str, TensorEntry], start: int, size: int) -> None:
    """Byte ranges must follow each other without gap or overlap and end with the file."""
    position = start
    for entry in sorted(entries.values(), key=lambda one: (one.offset, one.num_bytes)):
        if entry.offset + entry.num_bytes > size:
            raise CheckpointError(
                f"tensor {entry.name} in {file} is truncated: it ends at byte "
                f"{entry.offset + entry.num_bytes}, the file at {size}. Download the file again"
            )
        if entry.offset != position:
            raise _broken(file, f"tensor {entry.name} overlaps another or leaves a gap")
        position += entry.num_bytes
    if position != size:
        raise _broken(file, f"{size - position} bytes follow its last tensor")


def _broken(file: Path, problem: str) -> CheckpointError:
    return CheckpointError(f"{file} is not a sound safetensors file: {problem}. Export it again")
