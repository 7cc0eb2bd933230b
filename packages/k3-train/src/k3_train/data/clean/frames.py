"""Near-duplicate pictures and clips by a perceptual hash over frames (report 6).

The hash is the usual one: 32 x 32 grey values, a two-dimensional DCT, the signs of the 8 x 8 lowest
frequencies against their median. Own, because the libraries bring SciPy for one small transform.
"""

from collections.abc import Sequence

import numpy as np
from PIL import Image

SIDE, LOW = 32, 8
MAX_DISTANCE = 4
"""Bits of 64 in which frames of one picture may differ (our own choice)."""
MIN_SHARE = 0.8
"""Share of the frames of a clip that have to be alike (our own choice)."""
_COSINES = np.cos(np.pi / SIDE * np.outer(np.arange(LOW), np.arange(SIDE) + 0.5))


def perceptual_hash(image: Image.Image) -> int:
    """64 bits that scaling, compression and small changes of brightness hardly move."""
    small = image.convert("L").resize((SIDE, SIDE), Image.Resampling.LANCZOS)
    low = _COSINES @ np.asarray(small, np.float64) @ _COSINES.T
    bits = (low > np.median(low)).ravel()
    return int.from_bytes(np.packbits(bits).tobytes(), "big")


class FrameIndex:
    """Hashes of the clips that were kept; a picture is a clip of one frame."""

    def __init__(self, max_distance: int = MAX_DISTANCE, min_share: float = MIN_SHARE) -> None:
        self._max_distance, self._min_share = max_distance, min_share
        self._hashes = np.empty(0, np.uint64)
        self._clips = np.empty(0, np.int64)
        self._num_clips = 0

    def find_or_add(self, frames: Sequence[Image.Image]) -> int | None:
        """The number of a clip that has most of these frames, or None: they are then added.

        Clips are numbered from 0 as they are added.
        """
        hashes = np.array([perceptual_hash(frame) for frame in frames], np.uint64)
        votes = np.zeros(self._num_clips, np.int64)
        for one in hashes:
            is_near = np.bitwise_count(self._hashes ^ one) <= self._max_distance
            votes[np.unique(self._clips[is_near])] += 1
        alike = np.flatnonzero(votes >= max(1, self._min_share * len(hashes)))
        if len(alike):
            return int(alike[0])
        self._hashes = np.concatenate([self._hashes, hashes])
        self._clips = np.concatenate([self._clips, np.full(len(hashes), self._num_clips)])
        self._num_clips += 1
        return None
