"""Sums of partial gradients in a fixed order: the second half of a weight's gradient.

A backward kernel writes one row of float32 sums a program, without atomics; this one adds up the
rows, always in the same order, so that gradients are the same bits in every run.

1,056 rows of 512 columns are 9 steps that wait for memory; with steps of 32 rows they were 33.
Legend: P partial rows, C columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, ROWS, NUM_WARPS = 32, 128, 8
"""Columns of a program, rows of its step, and warps."""


@triton.jit
def column_total(partial_ptr, column, num_rows, num_columns, BP: tl.constexpr, BC: tl.constexpr):
    """Sums [BC] of these columns of a float32 matrix [num_rows, num_columns]."""
    row = tl.arange(0, BP)
    acc = tl.zeros((BP, BC), tl.float32)
    for first in range(0, num_rows, BP):
        at = (first + row).to(tl.int64)[:, None] * num_columns + column[None, :]
        mask = (first + row < num_rows)[:, None] & (column < num_columns)[None, :]
        acc += tl.load(partial_ptr + at, mask=mask, other=0.0)
    return tl.sum(acc, axis=0)


@triton.jit
def column_sums_kernel(
    partial_ptr,
    out_ptr,
    num_rows,
    num_columns,
    GROUPS: tl.constexpr,
    BP: tl.constexpr,
    BC: tl.constexpr,
):
    """out = the sums of the columns; column (group, c) goes to (c, group)."""
    column = tl.program_id(0) * BC + tl.arange(0, BC)
    total = column_total(partial_ptr, column, num_rows, num_columns, BP, BC)
    width = num_columns // GROUPS
    out_at = out_ptr + column % width * GROUPS + column // width
    tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=column < num_columns)


def column_sums(partial_PC: Tensor, dtype: torch.dtype, groups: int = 1) -> Tensor:
    """Sums [C] of float32 partial sums; [groups, C / groups] is transposed."""
    num_rows, num_columns = partial_PC.shape
    out_C = torch.empty(num_columns, dtype=dtype, device=partial_PC.device)
    column_sums_kernel[(triton.cdiv(num_columns, BLOCK),)](
        partial_PC,
        out_C,
        num_rows,
        num_columns,
        GROUPS=groups,
        BP=ROWS,
        BC=BLOCK,
        num_warps=NUM_WARPS,
    )
    return out_C
