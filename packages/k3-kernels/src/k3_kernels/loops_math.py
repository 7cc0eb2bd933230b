"""What the loops of several ops share: parts of tensors, the exponential, products with a matrix.

Arrays given to a function must be contiguous by type (`vector`, its reshapes, their rows, `part`):
of others it does not know that their values are neighbours, and takes them one at a time.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

from k3_kernels.loops import compiled, vector

# Reordered, the sums that split a number and put it together again would cancel out.
_in_order: Any = njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract"})

_LARGEST, _SMALLEST = 709.0, -708.0
_LOG2_E = 1 / math.log(2)
_LN2_HIGH, _LN2_LOW = float.fromhex("0x1.62e42fefa0000p-1"), float.fromhex("0x1.cf79abc9e3b3ap-40")
_TO_INTEGER = 1.5 * 2.0**52
"""Added to a number, it leaves the nearest integer in the low bits of the sum."""
_C2, _C3, _C4, _C5, _C6, _C7, _C8, _C9, _C10, _C11, _C12 = (
    1 / math.factorial(n) for n in range(2, 13)
)


@compiled
def part(address: int, start: int, length: int, dtype: Any) -> np.ndarray:
    """`length` numbers from number `start` on, contiguous by type."""
    return vector(address, start + length, dtype)[start:]


@_in_order
def exp(x: float) -> float:
    """e^x in float64, to 4e-16 of itself, without a branch: a loop over it uses vector units.

    What leaves the range is 8e307 or 3e-308, NaN stays NaN.
    """
    power, rest = _power_and_rest(x)
    return power + power * rest


@_in_order
def expm1(x: float) -> float:
    """e^x - 1 like `exp`, to 7e-16 of itself."""
    power, rest = _power_and_rest(x)
    return (power - 1) + power * rest


@_in_order
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
