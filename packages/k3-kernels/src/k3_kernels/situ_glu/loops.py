"""situ_glu as a compiled loop, for a few values on a CPU. T rows, I channels."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from k3_core.replay import launch
from k3_kernels.loops import (
    DTYPES,
    compiled,
    compiled_in_order,
    is_for_one_thread,
    part,
    rows,
    takes,
)
from k3_kernels.loops.math import exp, expm1
from k3_kernels.situ_glu import cpu

MAX_VALUES = 2**18
"""Results of a call, for `is_for_one_thread`: two threads of torch are as fast as the loop."""


def situ_glu(gate: Tensor, up: Tensor, *, beta: float, linear_beta: float | None) -> Tensor:
    """beta tanh(gate/beta) sigmoid(gate) * linear_beta tanh(up/linear_beta); as the reference."""
    shape, num_values = gate.shape, gate.numel()
    is_taken = (
        num_values > 0
        and is_for_one_thread(num_values, MAX_VALUES)
        and up.shape == shape
        and takes(gate, up)
    )
    if not is_taken:
        return cpu.situ_glu(gate, up, beta=beta, linear_beta=linear_beta)
    gate, gate_stride = rows(gate)
    up, up_stride = rows(up)
    out = gate.new_empty(shape)
    width = shape[-1] if shape else 1
    launch(
        _situ_rows,
        gate.data_ptr(),
        up.data_ptr(),
        out.data_ptr(),
        num_values // width,
        width,
        gate_stride,
        up_stride,
        float(beta),
        float(linear_beta or 0.0),
        linear_beta is not None,
        DTYPES[gate.dtype],
    )
    return out


@compiled
def _situ_rows(
    gate: int,
    up: int,
    out: int,
    num_rows: int,
    width: int,
    gate_stride: int,
    up_stride: int,
    beta: float,
    linear_beta: float,
    has_cap: bool,
    dtype: Any,
) -> None:
    for t in range(num_rows):
        situ_row(
            part(gate, t * gate_stride, width, dtype),
            part(up, t * up_stride, width, dtype),
            beta,
            linear_beta,
            has_cap,
            part(out, t * width, width, dtype),
        )


@compiled
def situ_row(
    gate_I: np.ndarray,
    up_I: np.ndarray,
    beta: float,
    linear_beta: float,
    has_cap: bool,
    out_I: np.ndarray,
) -> None:
    """SiTU-GLU of contiguous rows; `out` may be one of them, but then takes no vector units.

    Nothing overflows on the way: each tanh is divided by itself, and from 2x = 20 in float32 and 40
    in float64 on it is 1.
    """
    kind = gate_I.dtype.type
    beta, linear_beta = kind(beta), kind(linear_beta)
    most, two = kind(20 if gate_I.itemsize == 4 else 40), kind(2)
    for i in range(len(gate_I)):
        sigmoid = kind(1) / (kind(1) + exp(-gate_I[i]))
        up = linear_beta * _tanh(up_I[i] / linear_beta, most, two) if has_cap else up_I[i]
        out_I[i] = beta * _tanh(gate_I[i] / beta, most, two) * up * sigmoid


@compiled_in_order
def _tanh(x: Any, most: Any, two: Any) -> Any:
    y = expm1(min(x + x, most))
    return y / (y + two)
