"""Block sizes of the kernels of kda_chunk's backward: tables in Python. Legend: K, V channels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from k3_kernels.kda_chunk.config import Precision, block_width

FEW_PROGRAMS = 66
"""Programs of the reverse scan that leave half of an H200 idle."""


@dataclass(frozen=True)
class BackwardBlocks:
    """values, warps, stages: block of V in the reverse scan and its launch; few_values: the block
    where larger ones leave most of the card idle; channels: block of K of a program of the last
    kernel; chunk_...: block of V that a step of it loads, and its launch; chunk_registers caps the
    registers of a thread (None: no cap)."""

    values: int
    warps: int = 4
    stages: int = 2
    few_values: int = 32
    channels: int = 64
    chunk_values: int = 64
    chunk_warps: int = 4
    chunk_stages: int = 2
    chunk_registers: int | None = None


_HALF = {
    # K, rounded up: blocks for two-byte operands
    16: BackwardBlocks(16, chunk_values=16),
    32: BackwardBlocks(32, chunk_values=32),
    64: BackwardBlocks(64),
    # The cap spills 70 values, and lets a multiprocessor hold three programs of the last kernel:
    # one loads while the others compute.
    128: BackwardBlocks(64, chunk_values=32, chunk_stages=3, chunk_registers=168),
    256: BackwardBlocks(64, warps=8, chunk_registers=168),
}
_FLOAT = {
    16: BackwardBlocks(16, stages=1, chunk_values=16, chunk_stages=1),
    32: BackwardBlocks(32, stages=1, chunk_values=32, chunk_stages=1),
    64: BackwardBlocks(32, stages=1, chunk_values=32, chunk_stages=1),
    128: BackwardBlocks(32, stages=1, chunk_values=32, chunk_stages=1),
    256: BackwardBlocks(16, stages=1, chunk_values=16, chunk_stages=1),
}


def reverse_values(blocks: BackwardBlocks, width: int, num_scans: int) -> int:
    """Block of V of the reverse scan, for V rounded up and num_scans pieces and heads."""
    values = min(blocks.values, width)
    if num_scans * (width // values) <= FEW_PROGRAMS:
        return min(values, blocks.few_values)
    return values


def choose_backward_blocks(num_k: int, precision: Precision) -> BackwardBlocks:
    """The table's launch parameters for K as a power of two: values only come in more blocks."""
    return (_FLOAT if precision.operand == torch.float32 else _HALF)[block_width(num_k)]
