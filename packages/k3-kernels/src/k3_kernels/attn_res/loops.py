"""attn_res as compiled loops, for a few tokens on a CPU. T tokens, D model width, S sources."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from k3_core.replay import launch
from k3_kernels.attn_res import cpu
from k3_kernels.loops import DTYPES, MAX_VALUES, compiled, is_for_one_thread, takes, vector
from k3_kernels.loops.math import exp

MAX_SOURCES = 16
_NO_SOURCES = (0,) * MAX_SOURCES


def attn_res(values: Sequence[Tensor], norm_D: Tensor, proj_1D: Tensor, *, eps: float) -> Tensor:
    """Softmax over the sources of proj . RMSNorm(v_i), applied to the v_i; as the reference."""
    if not (values and takes(*values, norm_D, proj_1D) and fits(values, norm_D, proj_1D)):
        return cpu.attn_res(values, norm_D, proj_1D, eps=eps)
    mix_TD = torch.empty_like(values[0])
    num_rows, width = mix_TD.shape
    launch(
        _mix_rows,
        addresses(values),
        len(values),
        norm_D.data_ptr(),
        proj_1D.data_ptr(),
        mix_TD.data_ptr(),
        num_rows,
        width,
        eps,
        DTYPES[mix_TD.dtype],
    )
    return mix_TD


def fits(values: Sequence[Tensor], norm_D: Tensor, proj_1D: Tensor) -> bool:
    """Whether the loops take these shapes and layouts; there is a source."""
    shape = values[0].shape
    for value in values:
        if value.shape != shape or not value.is_contiguous():
            return False
    return (
        len(values) <= MAX_SOURCES
        and len(shape) == 2
        and is_for_one_thread(shape[0] * shape[1], MAX_VALUES)
        and norm_D.shape == shape[1:]
        and proj_1D.shape == (1, shape[1])
        and norm_D.is_contiguous()
        and proj_1D.is_contiguous()
    )


def addresses(values: Sequence[Tensor]) -> tuple[int, ...]:
    """Where the sources are, always as many numbers: one compiled function takes them."""
    return (*[value.data_ptr() for value in values], *_NO_SOURCES[len(values) :])


@compiled
def _mix_rows(
    sources: tuple[int, ...],
    num_sources: int,
    norm: int,
    proj: int,
    mix: int,
    num_rows: int,
    width: int,
    eps: float,
    dtype: Any,
) -> None:
    query_D, weights_S = query(norm, proj, width, dtype), np.empty(num_sources, dtype)
    size = query_D.itemsize
    for t in range(num_rows):
        mix_row(sources, t, query_D, eps, weights_S, vector(mix + t * width * size, width, dtype))


@compiled
def query(norm: int, proj: int, width: int, dtype: Any) -> np.ndarray:
    """What scores a normalised source, [D], from the addresses of its two factors."""
    return vector(norm, width, dtype) * vector(proj, width, dtype)


@compiled
def mix_row(
    sources: tuple[int, ...],
    t: int,
    query_D: np.ndarray,
    eps: float,
    weights_S: np.ndarray,
    mix_D: np.ndarray,
) -> None:
    """One token's mix; the weights need room only."""
    width, dtype, zero = len(query_D), query_D.dtype, query_D.dtype.type(0)
    row = t * width * query_D.itemsize
    for s in range(len(weights_S)):
        x_D = vector(sources[s] + row, width, dtype)
        product, square = zero, zero
        for d in range(width):
            product += x_D[d] * query_D[d]
            square += x_D[d] * x_D[d]
        weights_S[s] = product / math.sqrt(square / width + eps)
    _softmax(weights_S)
    mix_D[:] = 0
    for s in range(len(weights_S)):
        x_D = vector(sources[s] + row, width, dtype)
        for d in range(width):
            mix_D[d] += weights_S[s] * x_D[d]


@compiled
def _softmax(x_S: np.ndarray) -> None:
    """In place."""
    largest = x_S[0]
    for s in range(1, len(x_S)):
        largest = max(largest, x_S[s])
    total = x_S.dtype.type(0)
    for s in range(len(x_S)):
        x_S[s] = exp(x_S[s] - largest)
        total += x_S[s]
    for s in range(len(x_S)):
        x_S[s] /= total
