"""Loops compiled by numba, for ops on a few tokens on a CPU: one call where torch makes ten.

At a few tokens a call of torch costs more than its arithmetic, and a decode step makes hundreds.
An op's `loops.py` computes in one compiled function. It takes float32 and float64 without
gradients, at most `MAX_TOKENS` tokens, and leaves other calls to the op's form in plain torch,
whose products of many tokens are faster and use all threads.

Tensors go into a compiled function as addresses, which `rows` and `vector` turn into arrays there:
a tensor's way through a NumPy array would cost more than most of these functions take.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

Function = TypeVar("Function", bound=Callable)

MAX_TOKENS = 64

DTYPES = {torch.float32: np.dtype(np.float32), torch.float64: np.dtype(np.float64)}
"""What compiled functions compute in, as they take it."""


def compiled(function: Function) -> Function:
    """The function as machine code, kept on disk; the interpreter lock is free while it runs.

    Sums may be reordered for vector units, the same way in every call; what is not finite stays so.
    """
    flags = {"reassoc", "contract", "arcp", "nsz"}
    made: Any = njit(cache=True, nogil=True, error_model="numpy", fastmath=flags)(function)
    return made  # type: ignore[no-any-return]


def _typed_pointer(_context: Any, address: Any) -> Any:
    """An integer as the pointer that it is."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


_pointer: Any = intrinsic(_typed_pointer)


@compiled
def vector(address: int, length: int, dtype: Any) -> np.ndarray:
    """The numbers at an address, [length]; for compiled functions."""
    return carray(_pointer(address), length, dtype)


@compiled
def rows(address: int, num_rows: int, width: int, stride: int, dtype: Any) -> np.ndarray:
    """Rows of contiguous numbers, `stride` of them apart, [num_rows, width]."""
    return carray(_pointer(address), (num_rows, stride), dtype)[:, :width]


def takes(*tensors: Tensor | None) -> bool:
    """Whether loops compute on these: one dtype, on a CPU, no gradients. Shapes are the op's."""
    dtype = None
    for tensor in tensors:
        if tensor is None:
            continue
        dtype = dtype or tensor.dtype
        if tensor.dtype is not dtype or not tensor.is_cpu:
            return False
        if tensor.requires_grad and torch.is_grad_enabled():
            return False
    return dtype in DTYPES
