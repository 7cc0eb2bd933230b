"""Files of cached bytes: a header, the payload, a checksum; never half a file (serving 9b).

Layout: magic (8 bytes), length of the header (u32, little endian), its checksum (16 bytes), the
header as a JSON object padded with spaces to that length, the payload. All before the payload are
whole blocks of `BLOCK` bytes. Checksums are BLAKE2b; that of the payload stands in the header. A
file is written under another name and then renamed.
"""

from __future__ import annotations

import json
import os
import struct
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

MAGIC = b"K3CACHE\n"
FORMAT = 1
BLOCK = 512
MAX_HEADER = 64 << 20
"""Bytes. A state's header names each page of its prefix: 35 bytes a page."""
_PREAMBLE = struct.Struct("<8sI16s")
PARTIAL = ".partial"


class BadFile(Exception):
    """A file that cannot be used. reason: missing, io, foreign, short or checksum."""

    def __init__(self, reason: str, path: Path, detail: str) -> None:
        super().__init__(f"{path.name}: {detail}")
        self.reason = reason


@dataclass(frozen=True)
class Header:
    """What a file holds.

    space: what its bytes depend on beside the key: weights, layout. part: "state" or "latents".
    key: of the last unit. kind: of the checkpoint, empty for latents. pages: per page of the
    prefix the key of its last unit, for a state.
    """

    space: str
    part: str
    key: str
    num_tokens: int
    kind: str
    pages: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    checksum: str
    format: int = FORMAT

    def encode(self) -> bytes:
        """The bytes in front of the payload."""
        text = json.dumps(asdict(self), separators=(",", ":")).encode()
        length = -(-(_PREAMBLE.size + len(text)) // BLOCK) * BLOCK - _PREAMBLE.size
        text = text.ljust(length)
        return _PREAMBLE.pack(MAGIC, length, checksum_of(text)) + text


def checksum_of(data: bytes | bytearray | memoryview) -> bytes:
    """BLAKE2b of some bytes, 16 bytes."""
    return blake2b(data, digest_size=16).digest()


def write_file(path: Path, header: Header, payload: bytes | bytearray | memoryview) -> int:
    """Writes a file whole or not at all; its size in bytes. Raises OSError."""
    partial = path.with_name(path.name + PARTIAL)
    try:
        with partial.open("wb") as file:
            file.write(header.encode())
            file.write(payload)
            size = file.tell()
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return size


def read_header(file: BinaryIO, path: Path) -> Header:
    """The header of an open file, which stands at the payload then. Raises BadFile."""
    preamble = file.read(_PREAMBLE.size)
    if len(preamble) < _PREAMBLE.size or not preamble.startswith(MAGIC):
        raise BadFile("foreign", path, "it does not begin like a cache file")
    _, length, checksum = _PREAMBLE.unpack(preamble)
    if length > MAX_HEADER:
        raise BadFile("foreign", path, f"its header has {length} bytes, more than {MAX_HEADER}")
    text = file.read(length)
    if len(text) < length:
        raise BadFile("short", path, "it ends inside its header")
    if checksum_of(text) != checksum:
        raise BadFile("checksum", path, "its header has changed")
    try:
        fields = json.loads(text)
        if fields.get("format") != FORMAT:
            raise BadFile("foreign", path, f"format {fields.get('format')}, not {FORMAT}")
        header = Header(**fields)
        return Header(**{**fields, "pages": tuple(header.pages), "shape": tuple(header.shape)})
    except (ValueError, TypeError, AttributeError) as error:
        raise BadFile("foreign", path, "its header cannot be read") from error


def scan_file(path: Path) -> tuple[Header, int]:
    """Header and size of a file that looks whole; the payload is not read. Raises BadFile."""
    try:
        with path.open("rb") as file:
            header = read_header(file, path)
            size = os.fstat(file.fileno()).st_size
            if size != file.tell() + header.num_bytes:
                raise BadFile("short", path, f"{size} bytes, not {file.tell() + header.num_bytes}")
    except OSError as error:
        raise BadFile("io", path, error.strerror or "it cannot be read") from error
    return header, size


def read_file(path: Path, space: str, part: str, key: bytes) -> tuple[Header, bytearray]:
    """Header and payload of the file of a key, both checked. Raises BadFile."""
    try:
        with path.open("rb") as file:
            header = read_header(file, path)
            if (header.space, header.part, header.key) != (space, part, key.hex()):
                raise BadFile("foreign", path, "it holds something else than its name says")
            if os.fstat(file.fileno()).st_size != file.tell() + header.num_bytes:
                raise BadFile("short", path, f"its payload does not have {header.num_bytes} bytes")
            payload = bytearray(header.num_bytes)
            if file.readinto(payload) != header.num_bytes:
                raise BadFile("short", path, "it was cut while it was read")
    except FileNotFoundError as error:
        raise BadFile("missing", path, "it is gone") from error
    except OSError as error:
        raise BadFile("io", path, error.strerror or "it cannot be read") from error
    if checksum_of(payload).hex() != header.checksum:
        raise BadFile("checksum", path, "its bytes have changed")
    return header, payload
