"""The compiled loops of kda_decode: rows, their tokens, the heads of a token.

A row's tokens run one after the other, on its state and window in the pools or, in a verify step,
on copies of them.
Legend: B rows, W tokens a row, H heads, K key, V value channels, C = H (2 K + V) channels,
R = taps - 1 inputs of a window, N numbers of a state or a window.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from k3_kernels.kda_step.token_loops import head_step, move_window, slots_fit
from k3_kernels.loops import compiled, vector
from k3_kernels.loops.math import exp
from k3_kernels.rms_norm.loops import norm_row


@compiled
def decode_rows(
    inputs: tuple[int, ...],
    strides: tuple[int, ...],
    weights: tuple[int, ...],
    pools: tuple[int, ...],
    results: tuple[int, ...],
    sizes: tuple[int, ...],
    numbers: tuple[float, ...],
    dtype: Any,
) -> bool:
    """Addresses in, results in place; False, and nothing done, for slots that do not fit.

    inputs: x, gate, beta, output gate; strides: two of each. weights: taps, A_log, dt_bias, norm.
    pools: state and window with a slot's stride each, slots. results: y; keys and writes or 0.
    sizes: B, W, H, K, V, R, slots. numbers: lower bound (0 for none), scale, eps.
    """
    num_rows, num_tokens, num_heads, num_k, num_v, num_inputs, num_slots = sizes
    state, state_stride, window, window_stride, slots = pools
    slots_B = vector(slots, num_rows, np.int64)
    if not slots_fit(slots_B, num_slots):
        return False
    num_cells, num_kept = num_heads * num_v * num_k, num_heads * (2 * num_k + num_v) * num_inputs
    is_verify = results[1] != 0
    state_copy_N = np.empty(num_cells if is_verify else 0, dtype)
    window_copy_N = np.empty(num_kept if is_verify else 0, dtype)
    size = state_copy_N.itemsize
    for b in range(num_rows):
        if slots_B[b] < 0:
            _clear(b, results, sizes, dtype)
            continue
        state_N = vector(state + slots_B[b] * state_stride * size, num_cells, dtype)
        window_N = vector(window + slots_B[b] * window_stride * size, num_kept, dtype)
        if is_verify:
            state_copy_N[:] = state_N
            window_copy_N[:] = window_N
            state_N, window_N = state_copy_N, window_copy_N
        for w in range(num_tokens):
            _token(b, w, inputs, strides, weights, results, sizes, numbers, state_N, window_N)
    return True


@compiled
def _clear(b: int, results: tuple[int, ...], sizes: tuple[int, ...], dtype: Any) -> None:
    """A padded row's results are zero."""
    _, num_tokens, num_heads, num_k, num_v, _, _ = sizes
    for result, width in zip(results, (num_v, num_k, num_v)):  # noqa: B905
        if result:
            num_numbers = num_tokens * num_heads * width
            result_N = vector(result, (b + 1) * num_numbers, dtype)
            result_N[b * num_numbers :] = 0


@compiled
def _token(
    b: int,
    w: int,
    inputs: tuple[int, ...],
    strides: tuple[int, ...],
    weights: tuple[int, ...],
    results: tuple[int, ...],
    sizes: tuple[int, ...],
    numbers: tuple[float, ...],
    state_N: np.ndarray,
    window_N: np.ndarray,
) -> None:
    """One token of a row; it moves the row's state and window."""
    _, num_tokens, num_heads, num_k, num_v, num_inputs, _ = sizes
    x, gate, beta, out_gate = inputs
    xb, xw, gb, gw, bb, bw, ob, ow = strides
    y, keys, writes = results
    num_keys, num_values, token = num_heads * num_k, num_heads * num_v, b * num_tokens + w
    num_channels, dtype, size = 2 * num_keys + num_values, state_N.dtype, state_N.itemsize
    qkv_C = np.empty(num_channels, dtype)
    x_C = vector(x + (b * xb + w * xw) * size, num_channels, dtype)
    taps_N = vector(weights[0], num_channels * (num_inputs + 1), dtype)
    _convolve(x_C, taps_N, window_N, qkv_C)
    if keys:
        vector(keys + token * num_keys * size, num_keys, dtype)[:] = qkv_C[num_keys : 2 * num_keys]
    gate_HK = vector(gate + (b * gb + w * gw) * size, num_keys, dtype)
    beta_H = vector(beta + (b * bb + w * bw) * size, num_heads, dtype)
    out_gate_HV = vector(out_gate + (b * ob + w * ow) * size, num_values, dtype)
    y_HV = vector(y + token * num_values * size, num_values, dtype)
    _heads(qkv_C, gate_HK, beta_H, out_gate_HV, weights, sizes, numbers, state_N, y_HV)
    if writes:
        vector(writes + token * num_values * size, num_values, dtype)[:] = qkv_C[2 * num_keys :]


@compiled
def _convolve(x_C: np.ndarray, taps_N: np.ndarray, window_N: np.ndarray, y_C: np.ndarray) -> None:
    """SiLU of the convolution's next output; the windows [C, R] move by one input."""
    num_inputs = len(window_N) // len(x_C)
    for c in range(len(x_C)):
        first, first_tap = c * num_inputs, c * (num_inputs + 1)
        total = taps_N[first_tap + num_inputs] * x_C[c]
        for r in range(num_inputs):
            total += taps_N[first_tap + r] * window_N[first + r]
        y_C[c] = total
    move_window(x_C, window_N)
    one = x_C.dtype.type(1)
    for c in range(len(x_C)):
        y_C[c] /= one + exp(-y_C[c])


@compiled
def _heads(
    qkv_C: np.ndarray,
    gate_HK: np.ndarray,
    beta_H: np.ndarray,
    out_gate_HV: np.ndarray,
    weights: tuple[int, ...],
    sizes: tuple[int, ...],
    numbers: tuple[float, ...],
    state_N: np.ndarray,
    y_HV: np.ndarray,
) -> None:
    """Every head's step, norm and gate; v in qkv becomes the writes."""
    _, _, num_heads, num_k, num_v, _, _ = sizes
    lower_bound, scale, eps = numbers
    dtype, one = qkv_C.dtype, qkv_C.dtype.type(1)
    num_keys, num_cells = num_heads * num_k, num_v * num_k
    A_log_H, bias_HK = vector(weights[1], num_heads, dtype), vector(weights[2], num_keys, dtype)
    norm_V, decay_K = vector(weights[3], num_v, dtype), np.empty(num_k, dtype)
    for h in range(num_heads):
        own_k, own_v = slice(h * num_k, (h + 1) * num_k), slice(h * num_v, (h + 1) * num_v)
        q_K, k_K = qkv_C[own_k], qkv_C[num_keys:][own_k]
        v_V, y_V, out_gate_V = qkv_C[2 * num_keys :][own_v], y_HV[own_v], out_gate_HV[own_v]
        head_step(
            state_N[h * num_cells : (h + 1) * num_cells],
            q_K,
            k_K,
            v_V,
            gate_HK[own_k],
            bias_HK[own_k],
            A_log_H[h],
            beta_H[h],
            lower_bound,
            scale,
            decay_K,
            y_V,
        )
        norm_row(y_V, norm_V, eps, y_V)
        for v in range(num_v):
            y_V[v] /= one + exp(-out_gate_V[v])
