"""rms_norm as a compiled loop, for a few tokens on a CPU. T rows, D channels."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from torch import Tensor

from k3_core.replay import launch
from k3_kernels.loops import (
    DTYPES,
    MAX_VALUES,
    compiled,
    is_for_one_thread,
    part,
    rows,
    takes,
    vector,
)
from k3_kernels.rms_norm import cpu


def rms_norm(x: Tensor, weight_D: Tensor, *, eps: float) -> Tensor:
    """[..., D] -> [..., D]; as the reference."""
    width, num_values = x.shape[-1], x.numel()
    is_taken = (
        is_for_one_thread(num_values, MAX_VALUES)
        and weight_D.shape == x.shape[-1:]
        and takes(x, weight_D)
    )
    if not is_taken:
        return cpu.rms_norm(x, weight_D, eps=eps)
    num_rows = num_values // max(width, 1)
    (x, stride), weight_D = rows(x), weight_D.contiguous()
    y = x.new_empty(x.shape)
    launch(
        _norm_rows,
        x.data_ptr(),
        weight_D.data_ptr(),
        y.data_ptr(),
        num_rows,
        width,
        stride,
        eps,
        DTYPES[x.dtype],
    )
    return y


@compiled
def _norm_rows(
    x: int, weight: int, y: int, num_rows: int, width: int, stride: int, eps: float, dtype: Any
) -> None:
    y_TD = vector(y, num_rows * width, dtype).reshape(num_rows, width)
    weight_D = vector(weight, width, dtype)
    for t in range(num_rows):
        norm_row(part(x, t * stride, width, dtype), weight_D, eps, y_TD[t])


@compiled
def norm_row(x_D: np.ndarray, weight_D: np.ndarray, eps: float, y_D: np.ndarray) -> None:
    """y = w x / sqrt(mean(x^2) + eps) of one row; `y` may be `x`."""
    total = x_D.dtype.type(0)
    for d in range(len(x_D)):
        total += x_D[d] * x_D[d]
    scale = x_D.dtype.type(1 / math.sqrt(total / len(x_D) + eps))
    for d in range(len(x_D)):
        y_D[d] = x_D[d] * scale * weight_D[d]
