"""linear by Triton for few rows; torch's product for others. T rows, I input, O output width."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from k3_core.custom_op import custom_op
from k3_core.ops.linear import reference
from k3_kernels.early import early_launch
from k3_kernels.launch import dot_precision, needs_grad
from k3_kernels.linear.kernel import linear_kernel

MAX_ROWS = 64
MAX_INPUTS = 1024
"""A program holds all inputs of its outputs."""
MAX_WEIGHTS = 2**23
"""Above it the time of a product is that of its bytes, at which torch is as good."""
PROCESSORS = 132
MAX_BYTES = 160 * 1024
"""Shared memory of a program."""


class Tile(NamedTuple):
    """Rows x outputs of a program, parts of the inputs, warps."""

    rows: int
    outputs: int
    parts: int
    num_warps: int


def linear(
    x: Tensor,
    weight_OI: Tensor,
    *,
    add_to: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """x W^T: [..., I] -> [..., O], plus `add_to` [T, O].

    16-bit products whose sums are wanted in float32 (logits) are not rounded on the way.
    """
    width = weight_OI.shape[1]
    num_rows = x.numel() // max(width, 1)
    if dtype not in (None, x.dtype) or not _takes(x, weight_OI, add_to, num_rows):
        if dtype == torch.float32 and _keeps_sums(x, weight_OI):
            return torch.mm(x, weight_OI.t(), out_dtype=dtype)
        return reference.linear(x, weight_OI, add_to=add_to, dtype=dtype)
    return _few_rows(x, weight_OI, add_to=add_to, dtype=dtype)


@custom_op("linear.triton", is_differentiable=False)
def _few_rows(
    x: Tensor, weight_OI: Tensor, *, add_to: Tensor | None, dtype: torch.dtype | None
) -> Tensor:
    """In the dtype of x, which `dtype` is if it is given. Writes no argument, for graphs."""
    num_out, width = weight_OI.shape
    num_rows = x.numel() // width
    x_TI = x if x.dim() == 2 else x.reshape(num_rows, width)
    y = x.new_empty(*x.shape[:-1], num_out)
    tile = choose_tile(num_rows, width, num_out)
    linear_kernel[(triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_out, tile.outputs),)](
        x_TI,
        weight_OI,
        y if add_to is None else add_to,
        y,
        num_rows,
        x_TI.stride(0),
        weight_OI.stride(0),
        0 if add_to is None else add_to.stride(0),
        K=width,
        N=num_out,
        PARTS=tile.parts,
        BM=tile.rows,
        BN=tile.outputs,
        BK=max(16, triton.next_power_of_2(triton.cdiv(width, tile.parts))),
        HAS_ADDED=add_to is not None,
        PRECISION=dot_precision(x.dtype),
        **early_launch(num_rows, x.device),
        num_warps=tile.num_warps,
    )
    return y


def _keeps_sums(x: Tensor, weight_OI: Tensor) -> bool:
    """Whether torch has the product with float32 sums as its result."""
    is_half = x.is_cuda and x.dtype == weight_OI.dtype and x.element_size() == 2
    return is_half and x.dim() == 2 and not needs_grad(x, weight_OI)


def _takes(x: Tensor, weight_OI: Tensor, add_to: Tensor | None, num_rows: int) -> bool:
    """Whether the kernel computes this call."""
    num_out, width = weight_OI.shape
    tensors = (x, weight_OI) if add_to is None else (x, weight_OI, add_to)
    return (
        0 < num_rows <= MAX_ROWS
        and x.shape[-1] == width <= MAX_INPUTS
        and 0 < weight_OI.numel() <= MAX_WEIGHTS
        and x.element_size() == 2
        and all(t.dtype == x.dtype and t.stride(-1) == 1 for t in tensors)
        and (add_to is None or (x.dim() == 2 and add_to.shape == (num_rows, num_out)))
        and not needs_grad(*tensors)
    )


@cache
def choose_tile(num_rows: int, width: int, num_out: int) -> Tile:
    """The tile whose programs bring the fewest bytes to a multiprocessor, then the most programs.

    Both operands of a program come through its multiprocessor's share of the second-level cache.
    """
    padded = triton.next_power_of_2(width)
    most_rows = max(16, triton.next_power_of_2(num_rows))
    sizes = [
        (rows, outputs)
        for rows, outputs in product((16, 32, 64), (16, 32, 64))
        if rows <= most_rows and (rows + outputs) * padded * 2 <= MAX_BYTES
    ]

    def cost(size: tuple[int, int]) -> tuple[int, int]:
        rows, outputs = size
        programs = triton.cdiv(num_rows, rows) * triton.cdiv(num_out, outputs)
        return triton.cdiv(programs, PROCESSORS) * (rows + outputs), -programs

    rows, outputs = min(sizes, key=cost)
    if outputs == 64:
        return Tile(rows, outputs, 1, 4)
    parts = 8 if width > 512 else 4
    return Tile(rows, outputs, parts, parts)
