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

from k3_kernels.kda_chunk.forward import Saves
from k3_kernels.kda_chunk.plan import (
    Chunk,
    Pieces,
    Segments,
    Slab,
    cut_chunks,
    make_pieces,
    make_slab,
    send_table,
)

SLAB_CHUNKS = 6144
"""Chunks and heads in a slab: 0.65 GB of workspace at K = V = 128 in 16 bits, 0.45 without tiles,
46 programs of the last kernel for each multiprocessor of an H200."""
MAX_SLABS = 64
STRETCH = 16
"""Chunks of a stretch: a saved state is worth the workspace of one chunk or two."""
FREE_BYTES = 1_000_000_000
MOST_BYTES = 3_500_000_000
"""What a forward may save with the backward's workspace in any case, and of itself at most."""


@dataclass(frozen=True, eq=False)
class ReverseSlab:
    """A slab; stretches start from initial state n, or from saved state e written -1 - e; segments:
    of the reverse scan, those of a sequence last first, which start from the gradient of their
    number, or without maps of their sequence, and end (but for -1) in that of their sequence.
    """

    slab: Slab
    first_chunk: int
    stretches: Pieces
    segments: Segments


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

    @property
    def has_maps(self) -> bool:
        """Whether segments of the reverse scan need maps."""
        return any(slab.segments.maps.count for slab in self.slabs)


def choose_backward_slabs(lengths: tuple[int, ...], chunk: int, num_heads: int) -> int:
    """Slabs that bound the workspace."""
    chunks = sum(-(-length // chunk) for length in lengths)
    return max(1, min(MAX_SLABS, round(chunks * num_heads / SLAB_CHUNKS)))


def choose_saves(sizes: tuple[int, int, int], num_chunks: int, slab_chunks: int) -> Saves:
    """What a forward saves so that with the workspace of two slabs it takes no more than inputs, o,
    dO and gradients do; chunks are counted with heads, sizes are launch.chunk_bytes.

    A chunk's tiles spare prep's 20 ns on an H200, and its states and deltas the scan's 20 ns, each
    less the 2 to 8 ns of their stores.
    """
    tiles, kept, state = sizes
    # A state has V K of 16 bits, a chunk 10 tensors of 32 tokens: 2.5 of it where V = K = 128.
    limit = max(FREE_BYTES, num_chunks * state * 5 // 2)
    two = min(2 * slab_chunks, num_chunks)
    both = num_chunks * (tiles + kept)
    if both <= MOST_BYTES and both + two * state <= limit:
        return Saves.TILES_AND_STATES
    if num_chunks * tiles <= MOST_BYTES and num_chunks * tiles + two * (kept + state) <= limit:
        return Saves.TILES
    return Saves.NOTHING


@lru_cache(maxsize=64)
def make_backward_plan(
    lengths: tuple[int, ...],
    chunk: int,
    stretch: int,
    reverse_chunks: int,
    num_slabs: int,
    device: torch.device,
) -> BackwardPlan:
    """The tables of one packing; stretch: most chunks of a stretch; reverse_chunks: of a segment of
    the reverse scan, 0 = uncut."""
    chunks = [c for c in cut_chunks(lengths, chunk, ()) if c.tokens]
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    size = max(-(-len(chunks) // num_slabs), 1)
    offsets: list[list[int]] = [[] for _ in lengths]
    slabs = []
    saved = 0
    for at in range(0, len(chunks), size):
        own, rows, parts, place = chunks[at : at + size], [], [], 0
        for n, group in groupby(own, key=lambda c: c.sequence):
            part = list(group)
            for first in range(0, len(part), stretch):
                cut = part[first : first + stretch]
                initial = n
                if not cut[0].is_first:
                    initial, saved = -1 - saved, saved + 1
                    offsets[n].append(cut[0].first - starts[n])
                rows.append((*_piece(cut, place + first), initial, -1))
            parts.append((n, place, part))
            place += len(part)
        segments = _reverse_segments(parts, reverse_chunks, device)
        slab = make_slab(own, 0, device)
        slabs.append(ReverseSlab(slab, at, make_pieces(rows, device), segments))
    return BackwardPlan(tuple(slabs), tuple(map(tuple, offsets)), len(chunks))


def _reverse_segments(
    parts: list[tuple[int, int, list[Chunk]]], size: int, device: torch.device
) -> Segments:
    """Of the parts of sequences in a slab (sequence, first chunk, chunks); size: of a segment."""
    is_cut = size > 0 and any(len(part) > size for _, _, part in parts)
    maps: list[tuple[int, ...]] = []
    runs: list[tuple[int, ...]] = []
    bounds: list[tuple[int, int]] = []
    for n, place, part in parts:
        bounds.append((len(runs), n))
        for first in reversed(range(0, len(part), size if is_cut else len(part))):
            piece = _piece(part[first : first + size] if is_cut else part, place + first)
            j = len(runs)
            runs.append((*piece, j if is_cut else n, n if first == 0 else -1))
            if first > 0:
                maps.append((*piece, j, j))
    bounds.append((len(runs), 0))
    table = send_table(bounds, 2, device)
    return Segments(make_pieces(maps, device), make_pieces(runs, device), table, len(runs))


def _piece(cut: list[Chunk], first_chunk: int) -> tuple[int, ...]:
    """First token, tokens, first chunk, chunks."""
    return cut[0].first, sum(c.tokens for c in cut), first_chunk, len(cut)
