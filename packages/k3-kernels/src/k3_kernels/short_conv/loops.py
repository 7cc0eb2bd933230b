"""short_conv as compiled loops, for short sequences on a CPU: token by token, without a buffer.

Legend: T packed tokens, N sequences, C channels, W taps, R = W - 1 inputs of a state.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from k3_core.replay import launch
from k3_kernels.loops import DTYPES, compiled, in_dtype, is_for_one_thread, part, takes, vector
from k3_kernels.loops.math import exp
from k3_kernels.loops.packed import as_lengths, as_offsets, offsets_fit
from k3_kernels.short_conv import cpu

MAX_VALUES = 2**22
"""Inputs of a call. One thread of torch takes five times as long, many threads less."""


def short_conv(
    x_TC: Tensor,
    weight_C1W: Tensor,
    *,
    cu_seqlens_N1: Tensor,
    seqlens: tuple[int, ...] | None = None,
    initial_state_NCW: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Causal depthwise convolution and SiLU; as `k3_core.ops.short_conv.ShortConv`."""
    (weight,) = in_dtype(x_TC.dtype, weight_C1W)
    cu_N1, state = as_offsets(cu_seqlens_N1), initial_state_NCW
    if cu_N1 is not None and takes(x_TC, weight, state) and _fits(x_TC, weight, state, cu_N1):
        y_TC = x_TC.new_empty(x_TC.shape)
        final_NCR = None
        sizes = (len(x_TC), len(cu_N1) - 1, weight.shape[0], weight.shape[2] - 1)
        if output_final_state:
            final_NCR = x_TC.new_empty(sizes[1:])
        if state is not None:
            state = state.contiguous()
        weight = weight.contiguous()
        has_run = launch(
            _convolve,
            (x_TC.data_ptr(), weight.data_ptr(), 0 if state is None else state.data_ptr()),
            x_TC.stride(0),
            cu_N1.data_ptr(),
            as_lengths(seqlens),
            (y_TC.data_ptr(), 0 if final_NCR is None else final_NCR.data_ptr()),
            sizes,
            DTYPES[x_TC.dtype],
        )
        if has_run:
            return y_TC, final_NCR
    # It also raises for what does not fit.
    return cpu.short_conv(
        x_TC,
        weight_C1W,
        cu_seqlens_N1=cu_seqlens_N1,
        seqlens=seqlens,
        initial_state_NCW=initial_state_NCW,
        output_final_state=output_final_state,
    )


def _fits(x_TC: Tensor, weight_C1W: Tensor, state_NCR: Tensor | None, cu_N1: Tensor) -> bool:
    """Whether loops take these shapes; rows of x may lie apart."""
    if x_TC.dim() != 2 or weight_C1W.dim() != 3:
        return False
    num_channels, num_taps = x_TC.shape[1], weight_C1W.shape[2]
    return (
        x_TC.numel() > 0
        and is_for_one_thread(x_TC.numel(), MAX_VALUES)
        and num_taps > 0
        and x_TC.stride(1) == 1
        and weight_C1W.shape == (num_channels, 1, num_taps)
        and (state_NCR is None or state_NCR.shape == (len(cu_N1) - 1, num_channels, num_taps - 1))
    )


@compiled
def _convolve(
    inputs: tuple[int, ...],
    x_stride: int,
    cu: int,
    lengths_N: np.ndarray,
    results: tuple[int, ...],
    sizes: tuple[int, ...],
    dtype: Any,
) -> bool:
    """Addresses in, results in place; False, and nothing done, for offsets that do not fit.

    inputs: x, weight, initial state or 0; results: y, final state or 0; sizes: T, N, C, R.
    """
    num_tokens, num_sequences, num_channels, num_inputs = sizes
    x, weight, state = inputs
    y, final = results
    cu_N1 = vector(cu, num_sequences + 1, np.int64)
    if not offsets_fit(cu_N1, lengths_N, num_tokens):
        return False
    size, num_kept = num_inputs * num_channels, num_inputs + 1
    weight_CW = vector(weight, num_channels * num_kept, dtype)
    # The taps and the state with channels side by side, as the inputs have them.
    taps_N, history_N = np.empty(size + num_channels, dtype), np.zeros(size, dtype)
    _turn(weight_CW, num_channels, taps_N)
    for n in range(num_sequences):
        if state and num_inputs:
            _turn(part(state, n * size, size, dtype), num_channels, history_N)
        x_N = x + cu_N1[n] * x_stride * taps_N.itemsize
        length = cu_N1[n + 1] - cu_N1[n]
        for t in range(length):
            y_C = part(y, (cu_N1[n] + t) * num_channels, num_channels, dtype)
            _token(x_N, x_stride, t, history_N, taps_N, y_C)
        if final:
            final_N = part(final, n * size, size, dtype)
            for r in range(num_inputs):
                last_C = _input(x_N, x_stride, length - num_inputs + r, history_N, num_channels)
                for c in range(num_channels):
                    final_N[c * num_inputs + r] = last_C[c]
    return True


@compiled
def _turn(rows_N: np.ndarray, num_rows: int, columns_N: np.ndarray) -> None:
    """The matrix of `num_rows` rows, transposed."""
    num_columns = len(rows_N) // num_rows
    for row in range(num_rows):
        for column in range(num_columns):
            columns_N[column * num_rows + row] = rows_N[row * num_columns + column]


@compiled
def _input(x: int, x_stride: int, t: int, history_N: np.ndarray, num_channels: int) -> np.ndarray:
    """Token t of a sequence, [C]; those before 0 are in its history."""
    if t < 0:
        return history_N[len(history_N) + t * num_channels :][:num_channels]
    return part(x, t * x_stride, num_channels, history_N.dtype)


@compiled
def _token(
    x: int, x_stride: int, t: int, history_N: np.ndarray, taps_N: np.ndarray, y_C: np.ndarray
) -> None:
    """SiLU of the sums of a token."""
    num_channels, one = len(y_C), y_C.dtype.type(1)
    num_inputs = len(history_N) // num_channels
    y_C[:] = 0
    for r in range(num_inputs + 1):
        x_C = _input(x, x_stride, t - num_inputs + r, history_N, num_channels)
        tap_C = taps_N[r * num_channels :][:num_channels]
        for c in range(num_channels):
            y_C[c] += tap_C[c] * x_C[c]
    for c in range(num_channels):
        y_C[c] /= one + exp(-y_C[c])
