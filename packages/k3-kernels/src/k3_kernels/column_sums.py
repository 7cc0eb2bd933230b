"""Sums of partial gradients in a fixed order: the second half of a weight's gradient.

A backward kernel writes one row of float32 sums a program, without atomics; this one adds up the
rows, always in the same order, so that gradients are the same bits in every run.
Legend: P partial rows, C columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, ROWS = 64, 32


@triton.jit
def column_sums_kernel(
    partial_ptr,
    factor_ptr,
    out_ptr,
    num_rows,
    num_columns,
    HAS_FACTOR: tl.constexpr,
    GROUPS: tl.constexpr,
    BP: tl.constexpr,
    BC: tl.constexpr,
):
    """out = the sums of the columns, times factor [C]; column (group, c) goes to (c, group)."""
    column = tl.program_id(0) * BC + tl.arange(0, BC)
    row = tl.arange(0, BP)
    is_column = column < num_columns
    acc = tl.zeros((BP, BC), tl.float32)
    for first in range(0, num_rows, BP):
        at = (first + row).to(tl.int64)[:, None] * num_columns + column[None, :]
        mask = (first + row < num_rows)[:, None] & is_column[None, :]
        acc += tl.load(partial_ptr + at, mask=mask, other=0.0)
    total = tl.sum(acc, axis=0)
    if HAS_FACTOR:
        total *= tl.load(factor_ptr + column, mask=is_column, other=0.0).to(tl.float32)
    width = num_columns // GROUPS
    out_at = out_ptr + column % width * GROUPS + column // width
    tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=is_column)


def column_sums(
    partial_PC: Tensor, dtype: torch.dtype, factor_C: Tensor | None = None, groups: int = 1
) -> Tensor:
    """Sums [C] of float32 partial sums, times `factor`; [groups, C / groups] is transposed."""
    num_rows, num_columns = partial_PC.shape
    out_C = torch.empty(num_columns, dtype=dtype, device=partial_PC.device)
    column_sums_kernel[(triton.cdiv(num_columns, BLOCK),)](
        partial_PC,
        out_C if factor_C is None else factor_C.contiguous(),
        out_C,
        num_rows,
        num_columns,
        HAS_FACTOR=factor_C is not None,
        GROUPS=groups,
        BP=ROWS,
        BC=BLOCK,
        num_warps=4,
    )
    return out_C
