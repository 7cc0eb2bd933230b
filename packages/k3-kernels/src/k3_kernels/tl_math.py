"""Functions that several kernels share; all but `normed` take and return float32 tiles."""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) in 5 instructions; the reciprocal is the square of a reciprocal root."""
    root = tl.rsqrt(1.0 + tl.exp2(x * -LOG2_E))
    return root * root


@triton.jit
def capped(x, cap, IS_FINE: tl.constexpr):
    """(n, d) with cap tanh(x / cap) = n / d and d in 1..2: several factors share one division.

    n = cap (1 - e) and d = 1 + e with e = exp(-2 |x / cap|) cancel near 0, where n comes from a
    series: to 1e-6 of its value when IS_FINE, else to 2e-5, a tenth of a float16 rounding.
    """
    size = tl.abs(x)
    e = tl.exp2(size * (-2.0 * LOG2_E / cap))
    d = 1.0 + e
    if IS_FINE:
        square = (x * x) * (1.0 / (cap * cap))
        series = 1.0 + square * (-1.0 / 3 + square * (2.0 / 15))
        n = tl.where(square < 0.01, size * series * d, cap - cap * e)
    else:
        n = tl.where(size < 0.008 * cap, size * d, cap - cap * e)
    sign = x.to(tl.int32, bitcast=True) & -2147483648
    return (n.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True), d


@triton.jit
def cap_and_slope(x, cap, IS_FINE: tl.constexpr):
    """cap tanh(x / cap) and its derivative 1 - tanh^2, exact where that is small."""
    n, d = capped(x, cap, IS_FINE)
    root = tl.rsqrt(d)
    inverse = root * root
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2_E / cap))
    return n * inverse, 4.0 * e * inverse * inverse


@triton.jit
def situ(gate, up, beta, linear_beta, HAS_CAP: tl.constexpr, IS_FINE: tl.constexpr):
    """beta tanh(gate / beta) sigmoid(gate), times the up branch, capped when HAS_CAP."""
    n, d = capped(gate, beta, IS_FINE)
    d *= 1.0 + tl.exp2(gate * -LOG2_E)
    if HAS_CAP:
        up, up_d = capped(up, linear_beta, IS_FINE)
        d *= up_d
    root = tl.rsqrt(d)
    return n * up * root * root


@triton.jit
def normed(x, weight, eps, D: tl.constexpr):
    """RMSNorm of rows in their dtype, which comes before the weight as released (architecture 3).

    A row is the last dimension of x, and has D values beside zeros."""
    wide = x.to(tl.float32)
    square = tl.sum(wide * wide, len(x.shape) - 1, keep_dims=len(x.shape) > 1)
    scaled = (wide * tl.rsqrt(square / D + eps)).to(x.dtype).to(tl.float32)
    return (scaled * weight.to(x.dtype).to(tl.float32)).to(x.dtype)
