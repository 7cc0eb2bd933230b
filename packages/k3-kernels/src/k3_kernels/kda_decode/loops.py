"""kda_decode as compiled loops, for a few tokens on a CPU.

Legend: B rows, W tokens a row, S slots, H heads, K key, V value channels, C = H (2 K + V) channels,
R = taps - 1 inputs of a window.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from k3_core.replay import launch
from k3_kernels.kda_decode import cpu
from k3_kernels.kda_decode.rows import decode_rows
from k3_kernels.loops import DTYPES, MAX_TOKENS, in_dtype, takes


def kda_decode(
    x_BWC: Tensor,
    conv_weight_C1R: Tensor,
    gate_BWHK: Tensor,
    beta_BWH: Tensor,
    A_log_H: Tensor,
    dt_bias_HK: Tensor,
    out_gate_BWHV: Tensor,
    norm_weight_V: Tensor,
    *,
    state_SHVK: Tensor,
    window_SCR: Tensor,
    slots_B: Tensor,
    lower_bound: float | None,
    eps: float,
    scale: float | None = None,
    keys_BWHK: Tensor | None = None,
    writes_BWHV: Tensor | None = None,
) -> Tensor:
    """y [B, W, H, V]; arguments and results as `k3_core.ops.kda_decode.KdaDecode`."""
    inputs = (x_BWC, gate_BWHK, beta_BWH, out_gate_BWHV)
    weights = in_dtype(x_BWC.dtype, conv_weight_C1R, A_log_H, dt_bias_HK, norm_weight_V)
    pools = (state_SHVK, window_SCR, slots_B)
    records = (keys_BWHK, writes_BWHV)
    y_BWHV = None
    if lower_bound is None or -math.inf < lower_bound < 0:
        factor = gate_BWHK.shape[-1] ** -0.5 if scale is None else scale
        numbers = (float(lower_bound or 0), float(factor), float(eps))
        y_BWHV = _decode(inputs, weights, pools, records, numbers)
    if y_BWHV is not None:
        return y_BWHV
    return cpu.kda_decode(
        x_BWC,
        conv_weight_C1R,
        gate_BWHK,
        beta_BWH,
        A_log_H,
        dt_bias_HK,
        out_gate_BWHV,
        norm_weight_V,
        state_SHVK=state_SHVK,
        window_SCR=window_SCR,
        slots_B=slots_B,
        lower_bound=lower_bound,
        eps=eps,
        scale=scale,
        keys_BWHK=keys_BWHK,
        writes_BWHV=writes_BWHV,
    )


def _decode(
    inputs: tuple[Tensor, ...],
    weights: tuple[Tensor, ...],
    pools: tuple[Tensor, ...],
    records: tuple[Tensor | None, ...],
    numbers: tuple[float, ...],
) -> Tensor | None:
    """The op's result, or None for what the loops do not take; then nothing has changed."""
    (x, gate, beta, out_gate), (taps, A_log, dt_bias, norm_weight) = inputs, weights
    (state, window, slots), (keys, writes) = pools, records
    sizes = _sizes(inputs, weights, pools, records)
    if sizes is None or not takes(*inputs, *weights, state, window, *records):
        return None
    num_k, num_v, num_inputs = sizes[3:6]
    (xb, xw, xc), (gb, gw, *gate_step) = x.stride(), gate.stride()
    (bb, bw, bh), (ob, ow, *out_gate_step) = beta.stride(), out_gate.stride()
    (ss, *state_step), (ws, *window_step) = state.stride(), window.stride()
    has_rows = (
        xc == bh == 1
        and gate_step == [num_k, 1]
        and out_gate_step == [num_v, 1]
        and state_step == [num_v * num_k, num_k, 1]
        and window_step == [num_inputs, 1]
    )
    if not has_rows:
        return None
    y = torch.empty_like(out_gate, memory_format=torch.contiguous_format)
    has_run = launch(
        decode_rows,
        (x.data_ptr(), gate.data_ptr(), beta.data_ptr(), out_gate.data_ptr()),
        (xb, xw, gb, gw, bb, bw, ob, ow),
        (taps.data_ptr(), A_log.data_ptr(), dt_bias.data_ptr(), norm_weight.data_ptr()),
        (state.data_ptr(), ss, window.data_ptr(), ws, slots.data_ptr()),
        (
            y.data_ptr(),
            0 if keys is None else keys.data_ptr(),
            0 if writes is None else writes.data_ptr(),
        ),
        sizes,
        numbers,
        DTYPES[y.dtype],
    )
    return y if has_run else None


def _sizes(
    inputs: tuple[Tensor, ...],
    weights: tuple[Tensor, ...],
    pools: tuple[Tensor, ...],
    records: tuple[Tensor | None, ...],
) -> tuple[int, ...] | None:
    """B, W, H, K, V, R and S; None for more tokens than loops take or what does not fit."""
    (x, gate, beta, out_gate), (taps, A_log, dt_bias, norm_weight) = inputs, weights
    (state, window, slots), (keys, writes) = pools, records
    (num_rows, num_tokens, num_heads, num_k), num_v = gate.shape, out_gate.shape[-1]
    num_slots, num_channels = state.shape[0], num_heads * (2 * num_k + num_v)
    num_taps = taps.shape[-1]
    fits = (
        num_rows * num_tokens <= MAX_TOKENS
        and num_taps > 1
        and x.shape == (num_rows, num_tokens, num_channels)
        and beta.shape == (num_rows, num_tokens, num_heads)
        and out_gate.shape == (num_rows, num_tokens, num_heads, num_v)
        and taps.shape == (num_channels, 1, num_taps)
        and A_log.shape == (num_heads,)
        and dt_bias.shape == (num_heads, num_k)
        and norm_weight.shape == (num_v,)
        and state.shape == (num_slots, num_heads, num_v, num_k)
        and window.shape == (num_slots, num_channels, num_taps - 1)
        and slots.shape == (num_rows,)
        and slots.dtype is torch.int64
        and slots.is_cpu
        and taps.is_contiguous()
        and A_log.is_contiguous()
        and dt_bias.is_contiguous()
        and norm_weight.is_contiguous()
        and slots.is_contiguous()
    )
    if keys is not None or writes is not None:
        fits = (
            fits
            and (keys is not None and keys.shape == gate.shape and keys.is_contiguous())
            and (writes is not None and writes.shape == out_gate.shape and writes.is_contiguous())
        )
    if not fits:
        return None
    return num_rows, num_tokens, num_heads, num_k, num_v, num_taps - 1, num_slots
