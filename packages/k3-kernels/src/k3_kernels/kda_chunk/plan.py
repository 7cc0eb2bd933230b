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

STEP_US = 1.5
"""Latency of one chunk in the scan; predicted for chunk 64 on an H200."""
COMBINE_US = 4.0
"""Latency of one segment in the composition, and a share of the two extra launches."""
PROGRAMS_PER_SM = 2
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

    Uncut, the longest sequence takes one step a chunk while N H blocks programs run. Cut in s, its
    steps fall by s, twice (maps and run), the maps take twice the programs of the run, and the
    composition adds s short steps. Programs beyond the card's capacity run in further waves.
    """
    chunks = [-(-length // chunk) for length in lengths]
    longest = max(chunks, default=0)
    capacity = PROGRAMS_PER_SM * num_sms

    def waves(steps: int, programs_per_piece: int) -> float:
        work = sum(-(-c // steps) for c in chunks) * num_heads * programs_per_piece
        return max(1.0, work / capacity)

    best, best_us = 0, longest * STEP_US * waves(max(longest, 1), num_blocks)
    for parts in range(2, MAX_SEGMENTS + 1):
        steps = -(-longest // parts)
        rounds = waves(steps, num_blocks) + waves(steps, 2 * num_blocks)
        cost_us = steps * STEP_US * rounds + parts * COMBINE_US
        if cost_us < best_us:
            best, best_us = steps, cost_us
    return best


def to_device(rows: list, width: int, device: torch.device) -> Tensor:
    """int64 rows on `device`; from pinned memory, so that the host does not wait."""
    with torch.inference_mode(False):
        table = torch.tensor(rows, dtype=torch.int64).view(-1, width)
        if device.type == "cuda":
            return table.pin_memory().to(device, non_blocking=True)
        return table.to(device)


@lru_cache(maxsize=64)
def make_plan(
    lengths: tuple[int, ...], chunk: int, segment_chunks: int, device: torch.device
) -> Plan:
    """The tables of one packing; `segment_chunks` is the most chunks of a segment, 0 = uncut."""
    chunks, sequences, maps, runs, first_segment = [], [], [], [], [0]
    start = 0
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
            to_device(first_segment, 1, device),
            len(runs),
        )
    return Plan(to_device(chunks, 2, device), len(chunks), _pieces(sequences, device), segments)


def _pieces(rows: list[tuple[int, ...]], device: torch.device) -> Pieces:
    """Longest first, so that no long piece starts when the others are done."""
    return Pieces(to_device(sorted(rows, key=lambda row: -row[1]), 5, device), len(rows))
