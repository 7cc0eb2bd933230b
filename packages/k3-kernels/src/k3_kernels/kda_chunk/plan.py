"""How packed sequences are cut: index tables of chunks, pieces and segments (report 1.6).

Tables are built on the host from the lengths, sent once without waiting for the device, and kept:
the layers of a model, and the replays of a CUDA graph, ask for the same ones again.
Legend: N sequences, C chunks of all sequences, J segments of all sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

STEP_US = 0.9
"""Latency of one chunk in the scan; predicted for chunk 64 on an H200."""
COMBINE_US = 4.0
"""Latency of one segment in the composition, and a share of the two extra launches."""
SATURATION = 0.3
"""Programs a multiprocessor at which the scan's tiles (96 KiB a step) fill the memory's rate."""
MAX_SEGMENTS = 16


@dataclass(frozen=True, eq=False)
class Pieces:
    """What the scan runs over; int64 rows (first token, tokens, first chunk, initial, final)."""

    table: Tensor
    count: int


@dataclass(frozen=True, eq=False)
class Segments:
    """A cut of the sequences into segments.

    maps: the pieces whose affine map is needed (all but the last of each sequence), their results
    numbered by segment; runs: all segments, from the start state of their number, the last of a
    sequence ending in the sequence's final state; first: int64 [N + 1], first segment of each.
    """

    maps: Pieces
    runs: Pieces
    first: Tensor
    count: int


@dataclass(frozen=True, eq=False)
class Plan:
    """chunks: int64 [C, 2], first token and number of tokens; sequences: longest first."""

    chunks: Tensor
    num_chunks: int
    sequences: Pieces
    segments: Segments | None


def choose_segments(
    lengths: tuple[int, ...], chunk: int, num_heads: int, num_blocks: int, num_sms: int
) -> int:
    """Chunks per segment that the cost model finds fastest; 0 when cutting does not pay.

    Uncut, the longest sequence takes a step a chunk while N H blocks programs run, slower in
    proportion once these saturate the memory. Cut in s, steps fall by s and programs rise by s,
    twice: the maps take two programs where the run takes one, of half its bytes each. The
    composition adds s short steps.
    """
    chunks = [-(-length // chunk) for length in lengths]
    longest = max(chunks, default=0)

    def load(steps: int) -> float:
        pieces = sum(-(-c // steps) for c in chunks)
        return max(1.0, pieces * num_heads * num_blocks / (SATURATION * num_sms))

    best, best_us = 0, longest * STEP_US * load(max(longest, 1))
    for parts in range(2, MAX_SEGMENTS + 1):
        steps = -(-longest // parts)
        cost_us = steps * STEP_US * 2 * load(max(steps, 1)) + parts * COMBINE_US
        if cost_us < best_us:
            best, best_us = steps, cost_us
    return best


def _send(table: Tensor, device: torch.device) -> Tensor:
    """`table` on `device`; from pinned memory, so that the host does not wait."""
    if device.type == "cuda":
        return table.pin_memory().to(device, non_blocking=True)
    return table.to(device)


def _table(rows: list, width: int, device: torch.device) -> Tensor:
    """int64 [rows, width]."""
    with torch.inference_mode(False):
        return _send(torch.tensor(rows, dtype=torch.int64).view(-1, width), device)


@lru_cache(maxsize=16)
def decay_sums(chunk: int, tile: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[4, chunk, chunk]: sums over tokens that, times log decays, give the exponents of prep.

    From the middle of a token's own tile (half of what is behind less half of what is ahead), from
    the chunk's start, to the chunk's end, and to or from the edge between two tiles.
    """
    with torch.inference_mode(False):
        i, j = torch.arange(chunk)[:, None], torch.arange(chunk)
        is_past, is_same = j <= i, i // tile == j // tile
        middle = torch.where(is_past, 0.5, -0.5) * is_same
        edge = is_same & (is_past == (i >= tile))
        table = torch.stack([middle, is_past.double(), (~is_past).double(), edge.double()])
        return _send(table.to(dtype), device)


@lru_cache(maxsize=64)
def make_plan(
    lengths: tuple[int, ...], chunk: int, segment_chunks: int, device: torch.device
) -> Plan:
    """The tables of one packing; `segment_chunks` is the most chunks of a segment, 0 = uncut."""
    chunks: list[tuple[int, ...]] = []
    sequences: list[tuple[int, ...]] = []
    maps: list[tuple[int, ...]] = []
    runs: list[tuple[int, ...]] = []
    first_segment, start = [0], 0
    for n, length in enumerate(lengths):
        end, first_chunk = start + length, len(chunks)
        chunks += [(t, min(chunk, end - t)) for t in range(start, end, chunk)]
        sequences.append((start, length, first_chunk, n, n))
        size = segment_chunks * chunk or max(length, 1)
        cuts = list(range(start, end, size)) or [start]
        for cut in cuts:
            j, tokens, is_last = len(runs), min(size, end - cut), cut == cuts[-1]
            piece = (cut, tokens, first_chunk + (cut - start) // chunk, j)
            runs.append((*piece, n if is_last else -1))
            if not is_last:
                maps.append((*piece, j))
        first_segment.append(len(runs))
        start = end
    segments = None
    if maps:
        segments = Segments(
            _pieces(maps, device),
            _pieces(runs, device),
            _table(first_segment, 1, device),
            len(runs),
        )
    return Plan(_table(chunks, 2, device), len(chunks), _pieces(sequences, device), segments)


def _pieces(rows: list[tuple[int, ...]], device: torch.device) -> Pieces:
    """Longest first, so that no long piece starts when the others are done."""
    return Pieces(_table(sorted(rows, key=lambda row: -row[1]), 5, device), len(rows))
