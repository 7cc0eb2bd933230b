"""kda_replay as compiled loops, for a few tokens on a CPU: token by token, in place.

Calls without windows, which no layer makes, are left to plain torch.
Legend: B rows, W tokens a row, S slots, H heads, K key, V value channels, C channels of the
convolution, R inputs of its window, N numbers of a state or a window.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from k3_kernels.kda_replay import cpu
from k3_kernels.kda_step.token_loops import decay, move_window, normalize, slots_fit
from k3_kernels.loops import DTYPES, MAX_TOKENS, compiled, takes, vector


def kda_replay(
    k_BWHK: Tensor,
    gate_BWHK: Tensor,
    writes_BWHV: Tensor,
    A_log_H: Tensor,
    dt_bias_HK: Tensor,
    *,
    state_SHVK: Tensor,
    slots_B: Tensor,
    num_accepted_B: Tensor,
    lower_bound: float | None,
    x_BWC: Tensor | None = None,
    window_SCR: Tensor | None = None,
) -> None:
    """Apply accepted tokens to pooled states; as `k3_core.ops.kda_replay.KdaReplay`."""
    has_run = False
    if x_BWC is not None and window_SCR is not None:
        inputs = (k_BWHK, gate_BWHK, writes_BWHV, x_BWC)
        weights, pools = (A_log_H, dt_bias_HK), (state_SHVK, window_SCR)
        has_run = _replay(inputs, weights, pools, slots_B, num_accepted_B, lower_bound)
    if not has_run:
        cpu.kda_replay(
            *(k_BWHK, gate_BWHK, writes_BWHV, A_log_H, dt_bias_HK),
            state_SHVK=state_SHVK,
            slots_B=slots_B,
            num_accepted_B=num_accepted_B,
            lower_bound=lower_bound,
            x_BWC=x_BWC,
            window_SCR=window_SCR,
        )


def _replay(
    inputs: tuple[Tensor, ...],
    weights: tuple[Tensor, ...],
    pools: tuple[Tensor, ...],
    slots: Tensor,
    num_accepted: Tensor,
    lower_bound: float | None,
) -> bool:
    """Whether the loops have run; if not, nothing has changed."""
    (k, gate, writes, x), (A_log, dt_bias), (state, window) = inputs, weights, pools
    sizes = _sizes(inputs, weights, pools)
    has_bound = lower_bound is None or -math.inf < lower_bound < 0
    if sizes is None or not has_bound or not takes(*inputs, *weights, *pools):
        return False
    num_rows, _, _, num_k, num_v, _, num_inputs, _ = sizes
    for chosen in (slots, num_accepted):
        if chosen.shape != (num_rows,) or chosen.dtype is not torch.int64:
            return False
        if not (chosen.is_cpu and chosen.is_contiguous()):
            return False
    (gb, gw, *gate_step), (xb, xw, xc) = gate.stride(), x.stride()
    (ss, *state_step), (ws, *window_step) = state.stride(), window.stride()
    has_rows = (
        xc == 1
        and gate_step == [num_k, 1]
        and state_step == [num_v * num_k, num_k, 1]
        and window_step == [num_inputs, 1]
    )
    return has_rows and _replay_rows(
        (k.data_ptr(), gate.data_ptr(), writes.data_ptr(), x.data_ptr()),
        (gb, gw, xb, xw),
        (A_log.data_ptr(), dt_bias.data_ptr()),
        (state.data_ptr(), ss, window.data_ptr(), ws),
        slots.data_ptr(),
        num_accepted.data_ptr(),
        sizes,
        float(lower_bound or 0),
        DTYPES[k.dtype],
    )


def _sizes(
    inputs: tuple[Tensor, ...], weights: tuple[Tensor, ...], pools: tuple[Tensor, ...]
) -> tuple[int, ...] | None:
    """B, W, H, K, V, C, R and S; None for more tokens than loops take or what does not fit."""
    (k, gate, writes, x), (A_log, dt_bias), (state, window) = inputs, weights, pools
    (num_rows, num_tokens, num_heads, num_k), num_v = k.shape, writes.shape[-1]
    num_slots, num_channels, num_inputs = state.shape[0], x.shape[-1], window.shape[-1]
    fits = (
        num_rows * num_tokens <= MAX_TOKENS
        and num_inputs > 0
        and gate.shape == k.shape
        and writes.shape == (num_rows, num_tokens, num_heads, num_v)
        and x.shape == (num_rows, num_tokens, num_channels)
        and A_log.shape == (num_heads,)
        and dt_bias.shape == (num_heads, num_k)
        and state.shape == (num_slots, num_heads, num_v, num_k)
        and window.shape == (num_slots, num_channels, num_inputs)
        and k.is_contiguous()
        and writes.is_contiguous()
        and A_log.is_contiguous()
        and dt_bias.is_contiguous()
    )
    if not fits:
        return None
    return num_rows, num_tokens, num_heads, num_k, num_v, num_channels, num_inputs, num_slots


@compiled
def _replay_rows(
    inputs: tuple[int, ...],
    strides: tuple[int, ...],
    weights: tuple[int, ...],
    pools: tuple[int, ...],
    slots: int,
    num_accepted: int,
    sizes: tuple[int, ...],
    lower_bound: float,
    dtype: Any,
) -> bool:
    """Addresses in, pools in place; False, and nothing done, for slots or counts that do not fit.

    inputs: k, gate, writes, x; strides: two of gate and x each. weights: A_log, dt_bias.
    pools: state and window with a slot's stride each.
    """
    num_rows, num_tokens, num_heads, num_k, num_v, num_channels, num_inputs, num_slots = sizes
    state, state_stride, window, window_stride = pools
    slots_B, count_B = vector(slots, num_rows, np.int64), vector(num_accepted, num_rows, np.int64)
    if not slots_fit(slots_B, num_slots):
        return False
    for b in range(num_rows):
        if count_B[b] < 0 or count_B[b] > num_tokens:
            return False
    num_cells, num_kept = num_heads * num_v * num_k, num_channels * num_inputs
    size = np.empty(0, dtype).itemsize
    for b in range(num_rows):
        if slots_B[b] < 0 or count_B[b] == 0:
            continue
        state_N = vector(state + slots_B[b] * state_stride * size, num_cells, dtype)
        window_N = vector(window + slots_B[b] * window_stride * size, num_kept, dtype)
        for w in range(count_B[b]):
            _apply(b, w, inputs, strides, weights, sizes, lower_bound, state_N)
            x = inputs[3] + (b * strides[2] + w * strides[3]) * size
            move_window(vector(x, num_channels, dtype), window_N)
    return True


@compiled
def _apply(
    b: int,
    w: int,
    inputs: tuple[int, ...],
    strides: tuple[int, ...],
    weights: tuple[int, ...],
    sizes: tuple[int, ...],
    lower_bound: float,
    state_N: np.ndarray,
) -> None:
    """A token's decay and write of every head."""
    _, num_tokens, num_heads, num_k, num_v, _, _, _ = sizes
    dtype, size, token = state_N.dtype, state_N.itemsize, b * num_tokens + w
    num_keys, num_values = num_heads * num_k, num_heads * num_v
    k_HK = vector(inputs[0] + token * num_keys * size, num_keys, dtype)
    gate_HK = vector(inputs[1] + (b * strides[0] + w * strides[1]) * size, num_keys, dtype)
    write_HV = vector(inputs[2] + token * num_values * size, num_values, dtype)
    A_log_H, bias_HK = vector(weights[0], num_heads, dtype), vector(weights[1], num_keys, dtype)
    k_K, decay_K = np.empty(num_k, dtype), np.empty(num_k, dtype)
    for h in range(num_heads):
        own = slice(h * num_k, (h + 1) * num_k)
        k_K[:] = k_HK[own]
        normalize(k_K, 1.0)
        decay(gate_HK[own], bias_HK[own], A_log_H[h], lower_bound, decay_K)
        for value in range(h * num_v, (h + 1) * num_v):
            first = value * num_k
            for k in range(num_k):
                left = state_N[first + k] * decay_K[k]
                state_N[first + k] = left + write_HV[value] * k_K[k]
