"""Block sizes of the kernels of kda_chunk's backward: tables in Python. Legend: K, V channels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from k3_kernels.kda_chunk.config import Precision, block_width


@dataclass(frozen=True)
class BackwardBlocks:
    """values, warps, stages: block of V in the reverse scan and its launch; chunk_...: block of V
    that a step of the last kernel loads, and its launch; chunk_registers caps the registers of a
    thread (None: no cap)."""

    values: int
    warps: int = 4
    stages: int = 3
    chunk_values: int = 64
    chunk_warps: int = 8
    chunk_stages: int = 3
    chunk_registers: int | None = None


_HALF = {
    # widest of K and V, rounded up: blocks for two-byte operands
    16: BackwardBlocks(16, chunk_values=16, chunk_warps=4),
    32: BackwardBlocks(32, chunk_values=32, chunk_warps=4),
    64: BackwardBlocks(64, chunk_warps=4),
    # The cap spills 190 values, and lets a multiprocessor hold two programs: one loads while the
    # other computes.
    128: BackwardBlocks(64, chunk_registers=128),
    256: BackwardBlocks(64, warps=8, stages=2, chunk_values=32, chunk_stages=2),
}
_FLOAT = {
    16: BackwardBlocks(16, stages=1, chunk_values=16, chunk_warps=4, chunk_stages=1),
    32: BackwardBlocks(32, stages=1, chunk_values=32, chunk_warps=4, chunk_stages=1),
    64: BackwardBlocks(32, stages=1, chunk_values=32, chunk_stages=1),
    128: BackwardBlocks(32, stages=1, chunk_values=32, chunk_stages=1),
    256: BackwardBlocks(16, stages=1, chunk_values=16, chunk_stages=1),
}


def choose_backward_blocks(num_k: int, num_v: int, precision: Precision) -> BackwardBlocks:
    """Launch parameters for a shape: the table's, for the wider of K and V as a power of two."""
    width = max(block_width(num_k), block_width(num_v))
    return (_FLOAT if precision.operand == torch.float32 else _HALF)[width]
