"""Scalar functions that several kernels share; all take and return float32 tiles."""

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """tanh to about 3e-7 of its value: a series near 0, where 2 sigmoid(2x) - 1 would cancel."""
    square = x * x
    series = 1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315)))
    return tl.where(square < 0.04, x * series, 2.0 * tl.sigmoid(2.0 * x) - 1.0)


@triton.jit
def situ(gate, up, beta, linear_beta, HAS_CAP: tl.constexpr):
    """beta tanh(gate / beta) sigmoid(gate), times the up branch, capped when HAS_CAP."""
    if HAS_CAP:
        up = linear_beta * tanh(up / linear_beta)
    return beta * tanh(gate / beta) * tl.sigmoid(gate) * up
