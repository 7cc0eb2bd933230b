"""short_conv over all sequences at once, plain torch on any device (architecture 3.2 step 1).

Every sequence gets its W - 1 rows of history in front of it, so that the convolution is W shifted
multiply-adds over one long buffer, and the final state its last W - 1 rows even when the sequence
is shorter than that. Rows of the result that mix two sequences are never selected.
Legend: T packed tokens, N sequences, C channels, W taps, L = T + N (W - 1) buffer rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from k3_core.custom_op import custom_op
from k3_core.ops.math import math_dtype
from k3_core.ops.short_conv.inputs import check_inputs
from k3_kernels.launch import needs_grad
from k3_kernels.once import refuse_second_derivative


@dataclass(frozen=True, eq=False)
class _Layout:
    """Rows of the buffer, int64: of each token, and of each sequence's history and last inputs."""

    num_rows: int
    token_T: Tensor
    history: Tensor  # [N * (W - 1)]
    last: Tensor  # [N * (W - 1)]


@lru_cache(maxsize=16)
def _layout(lengths: tuple[int, ...], num_history: int, device: torch.device) -> _Layout:
    with torch.inference_mode(False):
        length_N = torch.tensor(lengths, dtype=torch.int64)
        sequence_T = torch.arange(len(lengths)).repeat_interleave(length_N)
        token_T = torch.arange(len(sequence_T)) + (sequence_T + 1) * num_history
        start_N = length_N.cumsum(0) - length_N + torch.arange(len(lengths)) * num_history
        history = start_N[:, None] + torch.arange(num_history)
        last = history + length_N[:, None]
        num_rows = len(token_T) + history.numel()
        return _Layout(
            num_rows, token_T.to(device), history.flatten().to(device), last.flatten().to(device)
        )


@custom_op("short_conv.cpu")
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
    y_TC, final_NCW = causal_conv(
        x_TC, weight_C1W, cu_seqlens_N1, seqlens, initial_state_NCW, has_silu=True
    )
    return y_TC, final_NCW if output_final_state else None


def causal_conv(
    x_TC: Tensor,
    weight_C1W: Tensor,
    cu_seqlens_N1: Tensor,
    seqlens: tuple[int, ...] | None,
    initial_state_NCW: Tensor | None,
    *,
    has_silu: bool,
) -> tuple[Tensor, Tensor]:
    """short_conv with or without its SiLU, which is left out in the math dtype, not x's."""
    lengths = check_inputs(x_TC, weight_C1W, cu_seqlens_N1, seqlens, initial_state_NCW)
    if initial_state_NCW is None:
        initial_state_NCW = x_TC.new_zeros(len(lengths), x_TC.shape[1], weight_C1W.shape[2] - 1)
    is_decode = len(x_TC) == len(lengths) and min(lengths, default=0) == 1
    if is_decode and not needs_grad(x_TC, weight_C1W, initial_state_NCW):
        return _one_token(x_TC, weight_C1W[:, 0], initial_state_NCW, has_silu)
    layout = _layout(lengths, weight_C1W.shape[2] - 1, x_TC.device)
    return _ShortConv.apply(x_TC, weight_C1W, initial_state_NCW, layout, has_silu)


def _one_token(
    x_NC: Tensor, weight_CW: Tensor, state_NCW: Tensor, has_silu: bool
) -> tuple[Tensor, Tensor]:
    """Every sequence goes on by one token: a product of its last W inputs with the taps."""
    dtype = math_dtype(x_NC)
    window_NCW = torch.cat((state_NCW.to(dtype), x_NC.to(dtype).unsqueeze(-1)), dim=-1)
    sums_NC = torch.linalg.vecdot(window_NCW, weight_CW.to(dtype))
    y_NC = F.silu(sums_NC).to(x_NC.dtype) if has_silu else sums_NC
    return y_NC, window_NCW[..., 1:].to(state_NCW.dtype)


class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TC: Tensor,
        weight_C1W: Tensor,
        state_NCW: Tensor,
        layout: _Layout,
        has_silu: bool,
    ) -> tuple[Tensor, Tensor]:
        dtype = math_dtype(x_TC)
        weight_WC = weight_C1W[:, 0].t().to(dtype)
        buffer_LC = x_TC.new_empty(layout.num_rows, x_TC.shape[1], dtype=dtype)
        buffer_LC.index_copy_(0, layout.token_T, x_TC.to(dtype))
        history = state_NCW.transpose(1, 2).reshape(layout.history.numel(), x_TC.shape[1])
        buffer_LC.index_copy_(0, layout.history, history.to(dtype))

        num_history = state_NCW.shape[2]
        shifted = _shifted(buffer_LC, num_history)
        sums = shifted[0] * weight_WC[0]
        for j in range(1, num_history + 1):
            sums.addcmul_(shifted[j], weight_WC[j])
        sums_TC = sums.index_select(0, layout.token_T - num_history)
        last = buffer_LC.index_select(0, layout.last)
        last_NCW = last.view(state_NCW.transpose(1, 2).shape).transpose(1, 2)
        ctx.layout, ctx.has_silu = layout, has_silu
        ctx.dtypes = x_TC.dtype, weight_C1W.dtype, state_NCW.dtype
        ctx.save_for_backward(buffer_LC, sums_TC, weight_WC)
        y_TC = F.silu(sums_TC).to(x_TC.dtype) if has_silu else sums_TC
        return y_TC, last_NCW.to(state_NCW.dtype)

    @staticmethod
    def backward(
        ctx: Any, d_y_TC: Tensor, d_final_NCW: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, None, None]:
        refuse_second_derivative("short_conv")
        buffer_LC, sums_TC, weight_WC = ctx.saved_tensors
        layout, num_history = ctx.layout, weight_WC.shape[0] - 1
        d_sums_TC = d_y_TC
        if ctx.has_silu:
            gate_TC = torch.sigmoid(sums_TC)
            slope_TC = gate_TC * (1 + sums_TC * (1 - gate_TC))
            d_sums_TC = slope_TC.mul_(d_y_TC)
        d_sums = buffer_LC.new_zeros(max(0, layout.num_rows - num_history), buffer_LC.shape[1])
        d_sums.index_copy_(0, layout.token_T - num_history, d_sums_TC)

        d_buffer_LC = torch.zeros_like(buffer_LC)
        d_last = d_final_NCW.transpose(1, 2).reshape(layout.last.numel(), buffer_LC.shape[1])
        d_buffer_LC.index_copy_(0, layout.last, d_last.to(buffer_LC.dtype))
        for j, part in enumerate(_shifted(d_buffer_LC, num_history)):
            part.addcmul_(d_sums, weight_WC[j])
        d_weight_WC = [(part * d_sums).sum(0) for part in _shifted(buffer_LC, num_history)]
        d_history = d_buffer_LC.index_select(0, layout.history)
        d_state = d_history.view(d_final_NCW.transpose(1, 2).shape)
        x_dtype, weight_dtype, state_dtype = ctx.dtypes
        return (
            d_buffer_LC.index_select(0, layout.token_T).to(x_dtype),
            torch.stack(d_weight_WC, dim=1).unsqueeze(1).to(weight_dtype),
            d_state.transpose(1, 2).to(state_dtype),
            None,
            None,
        )


def _shifted(buffer_LC: Tensor, num_history: int) -> list[Tensor]:
    """The W views of the buffer whose weighted sum is the convolution."""
    num_sums = max(0, buffer_LC.shape[0] - num_history)
    return [buffer_LC[j : j + num_sums] for j in range(num_history + 1)]
