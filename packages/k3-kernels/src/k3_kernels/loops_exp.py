"""exp for compiled loops; the one in float32 is computed by vector units, libm's is not.

With n the multiple of log 2 next to x and r what is left, exp(x) = 2^n exp(r), and exp(r) is a
polynomial (that of Cephes' expf). The error is 2e-7 of the value at most.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import overload

_LOWEST, _HIGHEST, _OVERFLOW = np.float32(-87), np.float32(89), np.float32(128)
_ZERO, _HALF, _ONE = np.float32(0), np.float32(0.5), np.float32(1)
_LOG2_E = np.float32(1.4426950408889634)
_LOG_2, _LOG_2_REST = np.float32(0.693359375), np.float32(-2.12194440e-4)
_C2, _C3, _C4 = np.float32(0.50000001201), np.float32(0.16666665459), np.float32(0.041665795894)
_C5, _C6, _C7 = np.float32(8.3334519e-3), np.float32(1.3981999507e-3), np.float32(1.98756915e-4)


def exp(x: float) -> float:
    """e^x in the type of x, in compiled functions; float32 gives 0 below the normal numbers."""
    return math.exp(x)


@overload(exp, strict=False)
def _exp(x: Any) -> Callable:
    if x == types.float32:
        return lambda x: _exp_float32(x)
    return lambda x: math.exp(x)


# Sums stay in their order here: the two parts of log 2 must not be added up first.
@njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract"})
def _exp_float32(x: Any) -> Any:
    """No comparison turns NaN into a number but the one that finds an integer for it."""
    kept = _LOWEST if x < _LOWEST else x
    kept = _HIGHEST if kept > _HIGHEST else kept
    power = np.floor(kept * _LOG2_E + _HALF)
    r = kept - power * _LOG_2 - power * _LOG_2_REST
    p = ((((_C7 * r + _C6) * r + _C5) * r + _C4) * r + _C3) * r + _C2
    p = p * (r * r) + r + _ONE
    exponent = np.int32(power if power < _OVERFLOW else _OVERFLOW) + np.int32(127)
    scale = np.int32(exponent * np.int32(1 << 23)).view(np.float32)
    return _ZERO if x < _LOWEST else p * scale
