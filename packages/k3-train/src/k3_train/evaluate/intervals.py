"""95% intervals of shares, means and ratios."""

import math
from collections.abc import Sequence

Z = 1.959963984540054
"""The normal distribution has 95% between -Z and Z."""


def wilson(num_right: int, count: int) -> tuple[float, float]:
    """Wilson's score interval of a share; inside [0, 1] also where all or none is right."""
    if count < 1 or not 0 <= num_right <= count:
        raise ValueError(f"{num_right} right of {count} is no share")
    share, z2 = num_right / count, Z * Z
    centre = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = Z * math.sqrt(share * (1 - share) / count + z2 / (4 * count * count)) / (1 + z2 / count)
    return max(0.0, centre - half), min(1.0, centre + half)


def ratio(
    tops: Sequence[float], bottoms: Sequence[float]
) -> tuple[float, float | None, float | None]:
    """(sum of tops / sum of bottoms, low, high), with the pairs as the independent draws.

    Of losses and byte counts by document it is the loss a byte; the interval is that of the
    linearised ratio, which takes into account that tokens of a document are alike. One pair has
    no interval.
    """
    pairs = list(zip(tops, bottoms, strict=True))
    count, total = len(pairs), math.fsum(bottoms)
    value = math.fsum(tops) / total
    if count < 2:
        return value, None, None
    squares = math.fsum((top - value * bottom) ** 2 for top, bottom in pairs)
    half = Z * math.sqrt(squares * count / (count - 1)) / total
    return value, value - half, value + half
