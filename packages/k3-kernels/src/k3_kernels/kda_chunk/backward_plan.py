"""How the backward cuts packed sequences: slabs that bound its workspace, stretches to recompute.

The forward saves a float32 state at the start of every stretch but the first of a sequence. So the
slabs can be taken last first, and the stretches of a slab recomputed side by side; only the reverse
scan is serial over a sequence.
Legend: N sequences, E saved states.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

import torch

from k3_kernels.kda_chunk.plan import (
    Chunk,
    Pieces,
    Slab,
    cut_chunks,
    make_pieces,
    make_slab,
)

SLAB_CHUNKS = 6144
"""Chunks and heads in a slab: 0.65 GB of workspace at K = V = 128 in 16 bits, 46 programs of the
last kernel for each multiprocessor of an H200."""
MAX_SLABS = 64
SCAN_PROGRAMS = 264
"""Programs of the recomputing scan that fill an H200, two a multiprocessor."""
MIN_STRETCH = 16
"""Chunks of a stretch, at least: a saved state is worth the workspace of one chunk or two."""


@dataclass(frozen=True, eq=False)
class ReverseSlab:
    """A slab; `slab.pieces` are what the reverse scan runs over, whose states have their number in
    the last column; `stretches` start from initial state n, or from saved state e written -1 - e.
    """

    slab: Slab
    first_chunk: int
    stretches: Pieces


@dataclass(frozen=True, eq=False)
class BackwardPlan:
    """Slabs in order; offsets: of each sequence, the tokens after which the forward saves a state,
    numbered in this order."""

    slabs: tuple[ReverseSlab, ...]
    offsets: tuple[tuple[int, ...], ...]
    num_chunks: int

    @property
    def most_chunks(self) -> int:
        """Of a slab."""
        return max((slab.slab.num_chunks for slab in self.slabs), default=0)


def choose_stretch(
    lengths: tuple[int, ...], chunk: int, num_heads: int, num_blocks: int, num_slabs: int
) -> int:
    """Chunks of a stretch, with which the recomputing scan of a slab fills the card.

    num_blocks: programs of the scan for a stretch and head.
    """
    chunks = sum(-(-length // chunk) for length in lengths)
    wanted = -(-SCAN_PROGRAMS // max(num_heads * num_blocks, 1)) * num_slabs
    return max(MIN_STRETCH, -(-chunks // wanted))


def choose_backward_slabs(lengths: tuple[int, ...], chunk: int, num_heads: int) -> int:
    """Slabs that bound the workspace."""
    chunks = sum(-(-length // chunk) for length in lengths)
    return max(1, min(MAX_SLABS, round(chunks * num_heads / SLAB_CHUNKS)))


@lru_cache(maxsize=64)
def make_backward_plan(
    lengths: tuple[int, ...], chunk: int, stretch: int, num_slabs: int, device: torch.device
) -> BackwardPlan:
    """The tables of one packing; stretch: most chunks of a stretch."""
    chunks = [c for c in cut_chunks(lengths, chunk, ()) if c.tokens]
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    size = max(-(-len(chunks) // num_slabs), 1)
    offsets: list[list[int]] = [[] for _ in lengths]
    slabs = []
    saved = 0
    for at in range(0, len(chunks), size):
        own, rows, place = chunks[at : at + size], [], 0
        for n, group in groupby(own, key=lambda c: c.sequence):
            part = list(group)
            for first in range(0, len(part), stretch):
                cut = part[first : first + stretch]
                initial = n
                if not cut[0].is_first:
                    initial, saved = -1 - saved, saved + 1
                    offsets[n].append(cut[0].first - starts[n])
                rows.append(_row(cut, place + first, initial))
            place += len(part)
        slabs.append(ReverseSlab(make_slab(own, 0, device), at, make_pieces(rows, device)))
    return BackwardPlan(tuple(slabs), tuple(map(tuple, offsets)), len(chunks))


def _row(cut: list[Chunk], first_chunk: int, initial: int) -> tuple[int, ...]:
    return (cut[0].first, sum(c.tokens for c in cut), first_chunk, len(cut), initial, -1)
