"""Loops compiled by numba, for ops on a few tokens on a CPU: one call where torch makes ten.

At a few tokens a call of torch costs more than its arithmetic, and a decode step makes hundreds.
An op's `loops.py` computes in one compiled function. It takes float32 and float64 without
gradients, for steps of decoding at most `MAX_TOKENS` tokens, else as much work as is measured to be
faster on one thread than in the op's form in plain torch, to which it leaves other calls: their
products of many tokens are faster and use all threads.

Tensors go into a compiled function as addresses, which `vector` and `part` turn into arrays there:
a tensor's way through a NumPy array would cost more than most of these functions take.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import numba
import numpy as np
import torch
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

import k3_kernels
from k3_kernels.tuning import cache_folder

Function = TypeVar("Function", bound=Callable)

MAX_TOKENS = 64

MAX_VALUES = 2**21
"""Numbers of an input of an op that passes over memory once or twice, for `is_for_one_thread`."""

DTYPES = {torch.float32: np.dtype(np.float32), torch.float64: np.dtype(np.float64)}
"""What compiled functions compute in, as they take it."""


def compiled(function: Function) -> Function:
    """The function as machine code, kept on disk.

    Sums may be reordered for vector units, the same way in every call; what is not finite stays so.
    It keeps the interpreter lock: most calls take microseconds, and a step that gave the lock up
    at each of them would wait as often for the threads of a server.
    """
    return _compile(function, {"reassoc", "contract", "arcp", "nsz"})


def compiled_in_order(function: Function) -> Function:
    """`compiled` with every sum as it is written."""
    return _compile(function, {"contract"})


def _compile(function: Function, flags: set[str]) -> Function:
    config: Any = numba.config
    old, config.CACHE_DIR = config.CACHE_DIR, str(_cache_folder())
    try:
        make: Any = numba.njit(cache=True, error_model="numpy", fastmath=flags)
        return make(function)  # type: ignore[no-any-return]
    finally:
        config.CACHE_DIR = old


@cache
def _cache_folder() -> Path:
    """Named by the state of this package's files: numba looks at a function's own file only, and
    would keep code that it compiled from another file's function before that changed."""
    root = Path(k3_kernels.__path__[0])
    files = sorted(root.rglob("*.py"))
    state = "".join(f"{f.relative_to(root)} {f.stat().st_mtime_ns} " for f in files)
    name = blake2b(f"{root} {state}".encode(), digest_size=8).hexdigest()
    folder = Path(os.environ.get("NUMBA_CACHE_DIR") or cache_folder() / "numba")
    return folder / name


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
def part(address: int, start: int, length: int, dtype: Any) -> np.ndarray:
    """`length` numbers from number `start` on.

    An array is contiguous by type only as a `vector`, its reshapes, their rows, or a part: of
    others compiled code does not know that values are neighbours, and takes them one at a time.
    """
    return vector(address, start + length, dtype)[start:]


@compiled
def matrix(address: int, num_rows: int, width: int, stride: int, dtype: Any) -> np.ndarray:
    """Rows that begin `stride` numbers apart, [num_rows, width] without gaps: where they lie, or
    copied. A copy here takes a tenth of what torch's takes before the call."""
    if stride == width or num_rows == 1:
        return vector(address, num_rows * width, dtype).reshape(num_rows, width)
    copied = np.empty((num_rows, width), dtype)
    for r in range(num_rows):
        copied[r] = part(address, r * stride, width, dtype)
    return copied


def rows(x: Tensor) -> tuple[Tensor, int]:
    """`x` with contiguous rows, and how far apart these begin: those of a matrix stay in place."""
    if x.dim() == 2:
        stride, inner = x.stride()
        if inner == 1:
            return x, stride
    return x.contiguous(), x.shape[-1] if x.dim() else 1


def is_for_one_thread(work: int, most: int) -> bool:
    """Whether loops, which run on one thread, are to do that much: `most` is what they do rather
    than one thread of torch, and the more threads that has, the less it takes to pay for its calls.
    """
    return not torch.compiler.is_compiling() and work * torch.get_num_threads() <= most


def in_dtype(dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
    """Weights that stay float32 in every precision (architecture 2.1), in the dtype of the rest."""
    return tuple(w if w.dtype is dtype else w.to(dtype) for w in weights)


def takes(*tensors: Tensor | None) -> bool:
    """Whether loops compute on these: one dtype, on a CPU, no gradients; not in a graph, which has
    the forms in torch. Shapes are the op's."""
    if torch.compiler.is_compiling():
        return False
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
