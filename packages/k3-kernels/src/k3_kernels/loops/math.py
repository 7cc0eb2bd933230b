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
    power, rest = _power_and_rest_32(x)
    return _ZERO if x < _LOWEST else (rest + _ONE) * power


@compiled_in_order
def _power_and_rest_32(x: Any) -> Any:
    """(2^n, y) with 2^n (1 + y) = e^x in float32, n the integer next to x / log 2.

    No comparison turns NaN into a number but the one that finds an integer for it. With r what is
    left of x, y is a polynomial in it (that of Cephes' expf).
    """
    kept = _LOWEST if x < _LOWEST else x
    kept = _HIGHEST if kept > _HIGHEST else kept
    power = np.floor(kept * _LOG2_E_32 + _HALF)
    r = kept - power * _LOG_2 - power * _LOG_2_REST
    p = ((((_E7 * r + _E6) * r + _E5) * r + _E4) * r + _E3) * r + _E2
    exponent = np.int32(power if power < _OVERFLOW else _OVERFLOW) + np.int32(127)
    return np.int32(exponent * np.int32(1 << 23)).view(np.float32), p * (r * r) + r


@compiled_in_order
def _exp_float64(x: float) -> float:
    power, rest = _power_and_rest(x)
    y = power + power * rest
    y = math.inf if x > _LARGEST else y
    return 0.0 if x < _SMALLEST else y


def expm1(x: float) -> float:
    """e^x - 1 in the type of x, like `exp`, to 7e-16 or 2e-7 of itself, up to x = 88."""
    return math.expm1(x)


@overload(expm1, strict=False)
def _expm1(x: Any) -> Callable:
    if x == types.float32:
        return lambda x: _expm1_float32(x)
    return lambda x: _expm1_float64(x)


@compiled_in_order
def _expm1_float32(x: Any) -> Any:
    power, rest = _power_and_rest_32(x)
    return (power - _ONE) + power * rest


@compiled_in_order
def _expm1_float64(x: float) -> float:
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
def products_of_rows(w_OI: np.ndarray, x_RI: np.ndarray, num_rows: int, y_RO: np.ndarray) -> None:
    """y = W x of the first rows: eight at a time, which share the reads of W.

    A row's result does not depend on the others: every form below has eight sums under way, which
    the compiler makes in the same order.
    """
    first = 0
    while num_rows - first > 2:
        _products_of_eight(w_OI, x_RI, first, num_rows - 1, y_RO)
        first += 8
    if num_rows - first == 2:
        _products_of_two(w_OI, x_RI[first], x_RI[first + 1], y_RO[first], y_RO[first + 1])
    elif num_rows - first == 1:
        products(w_OI, x_RI[first], y_RO[first])


@compiled
def products(w_OI: np.ndarray, x_I: np.ndarray, y_O: np.ndarray) -> None:
    """y = W x of one row, eight outputs at a time; after the last one that one again."""
    last = len(w_OI) - 1
    for o in range(0, len(w_OI), 8):
        a = b = c = d = e = f = g = h = w_OI.dtype.type(0)
        o1, o2, o3, o4 = min(o + 1, last), min(o + 2, last), min(o + 3, last), min(o + 4, last)
        o5, o6, o7 = min(o + 5, last), min(o + 6, last), min(o + 7, last)
        w0_I, w1_I, w2_I, w3_I = w_OI[o], w_OI[o1], w_OI[o2], w_OI[o3]
        w4_I, w5_I, w6_I, w7_I = w_OI[o4], w_OI[o5], w_OI[o6], w_OI[o7]
        for i in range(len(x_I)):
            a += w0_I[i] * x_I[i]
            b += w1_I[i] * x_I[i]
            c += w2_I[i] * x_I[i]
            d += w3_I[i] * x_I[i]
            e += w4_I[i] * x_I[i]
            f += w5_I[i] * x_I[i]
            g += w6_I[i] * x_I[i]
            h += w7_I[i] * x_I[i]
        y_O[o], y_O[o1], y_O[o2], y_O[o3] = a, b, c, d
        y_O[o4], y_O[o5], y_O[o6], y_O[o7] = e, f, g, h


@compiled
def _products_of_two(
    w_OI: np.ndarray, x_I: np.ndarray, z_I: np.ndarray, y_O: np.ndarray, u_O: np.ndarray
) -> None:
    """y = W x and u = W z, four outputs at a time; after the last one that one again."""
    last = len(w_OI) - 1
    for o in range(0, len(w_OI), 4):
        a = b = c = d = e = f = g = h = w_OI.dtype.type(0)
        o1, o2, o3 = min(o + 1, last), min(o + 2, last), min(o + 3, last)
        w0_I, w1_I, w2_I, w3_I = w_OI[o], w_OI[o1], w_OI[o2], w_OI[o3]
        for i in range(len(x_I)):
            a += w0_I[i] * x_I[i]
            b += w1_I[i] * x_I[i]
            c += w2_I[i] * x_I[i]
            d += w3_I[i] * x_I[i]
            e += w0_I[i] * z_I[i]
            f += w1_I[i] * z_I[i]
            g += w2_I[i] * z_I[i]
            h += w3_I[i] * z_I[i]
        y_O[o], y_O[o1], y_O[o2], y_O[o3] = a, b, c, d
        u_O[o], u_O[o1], u_O[o2], u_O[o3] = e, f, g, h


@compiled
def _products_of_eight(
    w_OI: np.ndarray, x_RI: np.ndarray, first: int, last: int, y_RO: np.ndarray
) -> None:
    """Rows `first` .. `first + 7`; after the `last` one that one again."""
    r0, r1, r2, r3 = first, min(first + 1, last), min(first + 2, last), min(first + 3, last)
    r4, r5 = min(first + 4, last), min(first + 5, last)
    r6, r7 = min(first + 6, last), min(first + 7, last)
    x0_I, x1_I, x2_I, x3_I = x_RI[r0], x_RI[r1], x_RI[r2], x_RI[r3]
    x4_I, x5_I, x6_I, x7_I = x_RI[r4], x_RI[r5], x_RI[r6], x_RI[r7]
    for o in range(len(w_OI)):
        w_I = w_OI[o]
        a = b = c = d = e = f = g = h = w_OI.dtype.type(0)
        for i in range(len(w_I)):
            a += w_I[i] * x0_I[i]
            b += w_I[i] * x1_I[i]
            c += w_I[i] * x2_I[i]
            d += w_I[i] * x3_I[i]
            e += w_I[i] * x4_I[i]
            f += w_I[i] * x5_I[i]
            g += w_I[i] * x6_I[i]
            h += w_I[i] * x7_I[i]
        y_RO[r0, o], y_RO[r1, o], y_RO[r2, o], y_RO[r3, o] = a, b, c, d
        y_RO[r4, o], y_RO[r5, o], y_RO[r6, o], y_RO[r7, o] = e, f, g, h
