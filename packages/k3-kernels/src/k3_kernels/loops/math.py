"""What the loops of several ops share: exponentials, and products with a matrix.

The exponentials keep their sums in order: reordered, those that split a number and put it together
again would cancel out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from k3_kernels.loops import compiled, compiled_in_order

_LOWEST, _HIGHEST, _OVERFLOW = np.float32(-87), np.float32(89), np.float32(128)
_ZERO, _HALF, _ONE = np.float32(0), np.float32(0.5), np.float32(1)
_LOG2_E_32 = np.float32(1.4426950408889634)
_LOG_2, _LOG_2_REST = np.float32(0.693359375), np.float32(-2.12194440e-4)
_E2, _E3, _E4 = np.float32(0.50000001201), np.float32(0.16666665459), np.float32(0.041665795894)
_E5, _E6, _E7 = np.float32(8.3334519e-3), np.float32(1.3981999507e-3), np.float32(1.98756915e-4)


_LARGEST, _SMALLEST = 709.5, -708.0
_LOG2_E = 1 / math.log(2)
_LN2_HIGH, _LN2_LOW = float.fromhex("0x1.62e42fefa0000p-1"), float.fromhex("0x1.cf79abc9e3b3ap-40")
_TO_INTEGER = 1.5 * 2.0**52
"""Added to a number, it leaves the nearest integer in the low bits of the sum."""
_C2, _C3, _C4, _C5, _C6, _C7, _C8, _C9, _C10, _C11, _C12 = (
    1 / math.factorial(n) for n in range(2, 13)
)


def exp(x: float) -> float:
    """e^x in the type of x, for compiled functions: without a branch, so that loops over it use
    vector units.

    The error is 2e-7 of the value in float32, 4e-16 in float64; below the normal numbers it is 0.
    """
    return math.exp(x)


@overload(exp, strict=False)
def _exp(x: Any) -> Callable:
    if x == types.float32:
        return lambda x: _exp_float32(x)
    return lambda x: _exp_float64(x)


@compiled_in_order
def _exp_float32(x: Any) -> Any:
    """No comparison turns NaN into a number but the one that finds an integer for it.

    With n the multiple of log 2 next to x and r what is left, exp(x) = 2^n exp(r), and exp(r) is a
    polynomial (that of Cephes' expf).
    """
    kept = _LOWEST if x < _LOWEST else x
    kept = _HIGHEST if kept > _HIGHEST else kept
    power = np.floor(kept * _LOG2_E_32 + _HALF)
    r = kept - power * _LOG_2 - power * _LOG_2_REST
    p = ((((_E7 * r + _E6) * r + _E5) * r + _E4) * r + _E3) * r + _E2
    p = p * (r * r) + r + _ONE
    exponent = np.int32(power if power < _OVERFLOW else _OVERFLOW) + np.int32(127)
    scale = np.int32(exponent * np.int32(1 << 23)).view(np.float32)
    return _ZERO if x < _LOWEST else p * scale


@compiled_in_order
def _exp_float64(x: float) -> float:
    power, rest = _power_and_rest(x)
    y = power + power * rest
    y = math.inf if x > _LARGEST else y
    return 0.0 if x < _SMALLEST else y


@compiled_in_order
def expm1(x: float) -> float:
    """e^x - 1 in float64, like `exp`, to 7e-16 of itself."""
    power, rest = _power_and_rest(x)
    return (power - 1) + power * rest


@compiled_in_order
def _power_and_rest(x: float) -> tuple[float, float]:
    """(2^n, y) with 2^n (1 + y) = e^x, n the integer next to x / log 2."""
    z: Any = np.float64(x)
    z = _LARGEST if z > _LARGEST else z
    z = _SMALLEST if z < _SMALLEST else z
    shifted = z * _LOG2_E + _TO_INTEGER
    n = shifted - _TO_INTEGER
    r = z - n * _LN2_HIGH - n * _LN2_LOW
    y = _C10 + r * (_C11 + r * _C12)
    y = _C7 + r * (_C8 + r * (_C9 + r * y))
    y = _C4 + r * (_C5 + r * (_C6 + r * y))
    y = r + r * r * (_C2 + r * (_C3 + r * y))
    exponent = (np.float64(shifted).view(np.int64) + 1023) << 52
    return np.int64(exponent).view(np.float64), y


@compiled
def products(w_OI: np.ndarray, x_I: np.ndarray, y_O: np.ndarray) -> None:
    """y = W x of one row, four outputs at a time, so that they share the reads of x."""
    num_blocked = len(w_OI) // 4 * 4
    for o in range(0, num_blocked, 4):
        a = b = c = d = x_I.dtype.type(0)
        a_I, b_I, c_I, d_I = w_OI[o], w_OI[o + 1], w_OI[o + 2], w_OI[o + 3]
        for i in range(len(x_I)):
            a += a_I[i] * x_I[i]
            b += b_I[i] * x_I[i]
            c += c_I[i] * x_I[i]
            d += d_I[i] * x_I[i]
        y_O[o], y_O[o + 1], y_O[o + 2], y_O[o + 3] = a, b, c, d
    for o in range(num_blocked, len(w_OI)):
        y_O[o] = dot(w_OI[o], x_I)


@compiled
def dot(a_I: np.ndarray, b_I: np.ndarray) -> Any:
    """The sum of a b."""
    total = a_I.dtype.type(0)
    for i in range(len(a_I)):
        total += a_I[i] * b_I[i]
    return total
