"""Pixels of a heat map as a PNG in a data URI: a page stays small and needs no plotting library."""

import base64
import io
import math
from collections.abc import Sequence

from PIL import Image

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
    pixels = bytes(c for row in rows for value in row for c in colour_of(value, scale))
    file = io.BytesIO()
    Image.frombytes("RGB", (len(rows[0]), len(rows)), pixels).save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
