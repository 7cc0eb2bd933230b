"""linear by Triton for few rows; torch's product for others. T rows, I input, O output width."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from k3_core.custom_op import custom_op
from k3_core.ops.linear import reference
from k3_kernels.early import early_launch
from k3_kernels.hopper import fits_descriptors
from k3_kernels.launch import dot_precision, needs_grad
from k3_kernels.linear.kernel import narrow_kernel, wide_kernel

MAX_ROWS = 64
MAX_INPUTS = 1024
"""A program holds all inputs of its outputs."""
MAX_WEIGHTS = 2**23
"""Above it the time of a product is that of its bytes, at which torch is as good."""
PROCESSORS = 132
MAX_BYTES = 220 * 1024
"""Shared memory of a multiprocessor."""
PARTS = 4
"""Of the inputs, one for each warp, of tiles of fewer than `WIDE` outputs."""
WIDE = 64
SHORT = 512
"""64 rows on an H200, with a norm: 384 -> 512 2.91 us wide, 3.05 us by 16 outputs; 1024 -> 512 4.11
us and 3.88 us."""


class Tile(NamedTuple):
    """Rows x outputs of a program."""

    rows: int
    outputs: int


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
    common = {
        "N": num_out,
        "HAS_ADDED": add_to is not None,
        "PRECISION": dot_precision(x.dtype),
        **early_launch(num_rows, x.device),
    }
    tile = choose_tile(num_rows, width, num_out, fits_descriptors(x_TI, weight_OI))
    grid = (triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_out, tile.outputs),)
    added, added_stride = (add_to, add_to.stride(0)) if add_to is not None else (y, 0)
    common |= {"BM": tile.rows, "BN": tile.outputs}
    if tile.outputs == WIDE:
        x_desc, weight_desc = describe_rows(x_TI, tile.rows), describe_rows(weight_OI, tile.outputs)
        wide_kernel[grid](x_desc, weight_desc, added, y, num_rows, added_stride, **common)
    else:
        strides = x_TI.stride(0), weight_OI.stride(0), added_stride
        tensors = x_TI, weight_OI, added, y
        narrow_kernel[grid](*tensors, num_rows, *strides, K=width, **common, **parts_of(width))
    return y


def parts_of(width: int) -> dict[str, int]:
    """How a kernel of fewer than `WIDE` outputs cuts the inputs."""
    step = max(16, triton.next_power_of_2(triton.cdiv(width, PARTS)))
    return {"PARTS": PARTS, "BK": step, "num_warps": PARTS}


def describe_rows(x: Tensor, rows: int) -> TensorDescriptor:
    """Blocks of so many rows, with all inputs."""
    block = [rows, max(16, triton.next_power_of_2(x.shape[1]))]
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block)


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
def choose_tile(num_rows: int, width: int, num_out: int, has_descriptors: bool) -> Tile:
    """16 outputs while that makes a program a multiprocessor at most, else `WIDE`.

    Several tiles of rows that read few inputs are wide all the same: each reads the weights again.
    """
    row_tiles = triton.cdiv(num_rows, 16)
    is_short = row_tiles > 1 and width <= SHORT and has_descriptors
    if not is_short and row_tiles * triton.cdiv(num_out, 16) <= PROCESSORS:
        return Tile(16, 16)
    return choose_wide_tile(num_rows, width, num_out) if has_descriptors else Tile(16, 32)


@cache
def choose_wide_tile(num_rows: int, width: int, num_out: int) -> Tile:
    """Of wide tiles those with the fewest rows whose programs are all under way at once."""
    tiles = [Tile(16, WIDE)]
    for rows in (32, 64):
        if rows < 2 * num_rows and _fitting(rows, width):
            tiles.append(Tile(rows, WIDE))

    def is_at_once(tile: Tile) -> bool:
        programs = triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_out, WIDE)
        return programs <= PROCESSORS * _fitting(tile.rows, width)

    return next(filter(is_at_once, tiles), tiles[-1])


def _fitting(rows: int, width: int) -> int:
    """Programs of wide tiles that a multiprocessor holds."""
    return MAX_BYTES // ((rows + WIDE) * triton.next_power_of_2(width) * 2)
