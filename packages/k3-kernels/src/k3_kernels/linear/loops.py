"""linear as a compiled loop, for a few rows on a CPU, which a matmul of torch packs as if they were
many: one row of 192 -> 512 takes it 26 us and the loop 8, eight rows 39 us and 23.

T rows, I input and O output width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from k3_core.ops.linear import reference
from k3_core.replay import launch
from k3_kernels.loops import DTYPES, compiled, is_for_one_thread, matrix, rows, takes, vector
from k3_kernels.loops.math import products_of_rows

MAX_ROWS = 32
MAX_PRODUCTS = 2**25
"""Rows times weights. From `MAX_ROWS` on, or with the threads of torch, its product is faster."""


def linear(
    x: Tensor,
    weight_OI: Tensor,
    *,
    add_to: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """[..., I] -> [..., O], plus `add_to`; as the reference."""
    (num_out, width), num_rows = weight_OI.shape, x.numel() // max(x.shape[-1], 1)
    is_taken = (
        0 < num_rows <= MAX_ROWS
        and dtype in (None, x.dtype)
        and x.shape[-1] == width
        and is_for_one_thread(num_rows * num_out * width, MAX_PRODUCTS)
        and weight_OI.is_contiguous()
        and takes(x, weight_OI, add_to)
        and (add_to is None or add_to.shape == (*x.shape[:-1], num_out))
    )
    if not is_taken:
        return reference.linear(x, weight_OI, add_to=add_to, dtype=dtype)
    x, stride = rows(x)
    add_to = None if add_to is None else add_to.contiguous()
    y = x.new_empty(*x.shape[:-1], num_out)
    launch(
        _linear,
        x.data_ptr(),
        weight_OI.data_ptr(),
        0 if add_to is None else add_to.data_ptr(),
        y.data_ptr(),
        num_rows,
        width,
        stride,
        num_out,
        DTYPES[x.dtype],
    )
    return y


@compiled
def _linear(
    x: int,
    weight: int,
    add_to: int,
    y: int,
    num_rows: int,
    width: int,
    stride: int,
    num_out: int,
    dtype: Any,
) -> None:
    x_TI = matrix(x, num_rows, width, stride, dtype)
    y_TO = vector(y, num_rows * num_out, dtype).reshape(num_rows, num_out)
    weight_OI = vector(weight, num_out * width, dtype).reshape(num_out, width)
    products_of_rows(weight_OI, x_TI, num_rows, y_TO)
    if add_to:
        sums_N = vector(y, num_rows * num_out, dtype)
        added_N = vector(add_to, num_rows * num_out, dtype)
        for n in range(len(sums_N)):
            sums_N[n] += added_N[n]
