"""Pixels of a heat map as a PNG in a data URI: a page stays small and needs no plotting library."""

import base64
import math
import struct
import zlib
from collections.abc import Sequence

Colour = tuple[int, int, int]

SEQUENTIAL: tuple[Colour, ...] = ((247, 251, 255), (107, 174, 214), (8, 48, 107))
"""Little to much."""
DIVERGING: tuple[Colour, ...] = ((33, 102, 172), (247, 247, 247), (178, 24, 43))
"""Below, equal, above; tells apart for every kind of colour vision."""
MISSING: Colour = (200, 200, 200)


def colour_of(value: float, scale: Sequence[Colour]) -> Colour:
    """The colour at `value` in 0..1 (clipped) of a scale of evenly spaced colours; NaN is grey."""
    if math.isnan(value):
        return MISSING
    place = min(max(value, 0.0), 1.0) * (len(scale) - 1)
    low = min(int(place), len(scale) - 2)
    share = place - low
    return tuple(
        round(a + (b - a) * share) for a, b in zip(scale[low], scale[low + 1], strict=True)
    )  # type: ignore[return-value]


def data_uri(rows: Sequence[Sequence[float]], scale: Sequence[Colour]) -> str:
    """One pixel for each value in 0..1; all rows are equally long, the first is on top."""
    width = len(rows[0])
    lines = (b"\0" + bytes(c for v in row for c in colour_of(v, scale)) for row in rows)
    header = struct.pack(">IIBBBBB", width, len(rows), 8, 2, 0, 0, 0)
    packed = zlib.compress(b"".join(lines), 9)
    parts = (_chunk(b"IHDR", header), _chunk(b"IDAT", packed), _chunk(b"IEND", b""))
    file = b"\x89PNG\r\n\x1a\n" + b"".join(parts)
    return "data:image/png;base64," + base64.b64encode(file).decode()


def _chunk(name: bytes, data: bytes) -> bytes:
    checksum = zlib.crc32(name + data)
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", checksum)
