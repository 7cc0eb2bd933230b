"""How packed sequences are cut: index tables of slabs, chunks, pieces and segments (report 1.6).

Tables are built on the host from the lengths, sent once without waiting for the device, and kept:
the layers of a model, and the replays of a CUDA graph, ask for the same ones again.
Legend: N sequences, C chunks, J segments, P parts of sequences, of one slab.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Pieces:
    """What the scan runs over, longest first, so that no long piece starts when the others are
    done; int64 rows (first token, tokens, first chunk, chunks, initial state, final state).

    An initial state of -1 - n is the final state of sequence n, which an earlier slab wrote.
    """

    table: Tensor
    count: int
    most_chunks: int


@dataclass(frozen=True, eq=False)
class Segments:
    """A cut of the parts of sequences into segments.

    maps: the pieces whose affine map is needed (all but the last of each part), their results
    numbered by segment; runs: all segments, from the start state of their number, the last of a
    part ending in its sequence's final state; parts: int64 [P + 1, 2], first segment and initial
    state of each part.
    """

    maps: Pieces
    runs: Pieces
    parts: Tensor
    count: int


@dataclass(frozen=True, eq=False)
class Slab:
    """Chunks whose workspace is alive together; all numbers but tokens and states are its own.

    chunks: int64 [C, 4], first token, number of tokens, number of the exported state or -1, chunks
    to the end of the run that it is in; most_runs: of a piece. Runs end at exports, and their last
    chunk alone may be shorter than full.
    """

    chunks: Tensor
    num_chunks: int
    pieces: Pieces
    segments: Segments | None
    has_carry: bool
    is_cut: bool
    most_runs: int


@dataclass(frozen=True, eq=False)
class Plan:
    """Slabs in order: a sequence may go on in the next one, from the state that it left."""

    slabs: tuple[Slab, ...]
    num_exports: int


class Chunk(NamedTuple):
    """One chunk of a sequence; export: number of the state to export after it, or -1."""

    sequence: int
    first: int
    tokens: int
    export: int
    is_first: bool
    is_last: bool


def send_table(rows: list, width: int, device: torch.device) -> Tensor:
    """int64 [rows, width]; from pinned memory, so that the host does not wait."""
    with torch.inference_mode(False):
        table = torch.tensor(rows, dtype=torch.int64).view(-1, width)
        if device.type == "cuda":
            return table.pin_memory().to(device, non_blocking=True)
        return table.to(device)


def make_pieces(rows: list[tuple[int, ...]], device: torch.device) -> Pieces:
    rows = sorted(rows, key=lambda row: -row[3])
    return Pieces(send_table(rows, 6, device), len(rows), rows[0][3] if rows else 0)


def cut_chunks(
    lengths: tuple[int, ...], chunk: int, exports: tuple[tuple[int, ...], ...]
) -> Iterable[Chunk]:
    """The chunks of all sequences; one ends where a state is exported. An empty sequence has one
    empty chunk, so that its state passes through."""
    start = number = 0
    for n, length in enumerate(lengths):
        offsets, token = exports[n] if exports else (), 0
        for end in sorted({*offsets, length}):
            for first in range(token, end, chunk) if end else (0,):
                last = min(first + chunk, end)
                is_export = last in offsets
                yield Chunk(
                    n,
                    start + first,
                    last - first,
                    number if is_export else -1,
                    first == 0,
                    last == length,
                )
                number += is_export
            token = end
        start += length


def make_slab(chunks: list[Chunk], segment_chunks: int, device: torch.device) -> Slab:
    """Tables of one slab."""
    pieces: list[tuple[int, ...]] = []
    maps: list[tuple[int, ...]] = []
    runs: list[tuple[int, ...]] = []
    parts: list[tuple[int, int]] = []
    table: list[tuple[int, ...]] = []
    first_chunk = most_runs = 0
    for n, group in groupby(chunks, key=lambda c: c.sequence):
        part = list(group)
        initial = n if part[0].is_first else -1 - n
        own = [c for c in part if c.tokens]
        ends = [at for at, c in enumerate(own) if c.export >= 0 or at + 1 == len(own)]
        table += [
            (c.first, c.tokens, c.export, ends[bisect_left(ends, at)] - at + 1)
            for at, c in enumerate(own)
        ]
        most_runs = max(most_runs, len(ends))
        size = segment_chunks or max(len(own), 1)
        parts.append((len(runs), initial))
        for at in range(0, max(len(own), 1), size):
            cut, j = own[at : at + size], len(runs)
            first, tokens = part[0].first if not cut else cut[0].first, sum(c.tokens for c in cut)
            piece = (first, tokens, first_chunk + at, len(cut))
            is_last = at + size >= len(own)
            runs.append((*piece, j, n if is_last else -1))
            if not is_last:
                maps.append((*piece, j, j))
        pieces.append(
            (part[0].first, sum(c.tokens for c in own), first_chunk, len(own), initial, n)
        )
        first_chunk += len(own)
    segments = None
    if maps:
        parts.append((len(runs), 0))
        segments = Segments(
            make_pieces(maps, device),
            make_pieces(runs, device),
            send_table(parts, 2, device),
            len(runs),
        )
    return Slab(
        send_table(table, 4, device),
        len(table),
        make_pieces(pieces, device),
        segments,
        bool(chunks) and not chunks[0].is_first,
        any(c.export >= 0 for c in chunks),
        most_runs,
    )


@lru_cache(maxsize=64)
def make_plan(
    lengths: tuple[int, ...],
    chunk: int,
    segment_chunks: int,
    device: torch.device,
    exports: tuple[tuple[int, ...], ...] = (),
    num_slabs: int = 1,
) -> Plan:
    """The tables of one packing.

    segment_chunks: the most chunks of a segment, 0 = uncut; exports: for each sequence the
    increasing numbers of tokens, from 1 to its length, after which its state is exported (the
    states are numbered in this order); num_slabs: of about equal numbers of chunks, at most.
    """
    chunks = list(cut_chunks(lengths, chunk, exports))
    size = max(-(-len(chunks) // num_slabs), 1)
    slabs = [chunks[at : at + size] for at in range(0, max(len(chunks), 1), size)]
    num_exports = sum(map(len, exports))
    return Plan(tuple(make_slab(s, segment_chunks, device) for s in slabs), num_exports)
