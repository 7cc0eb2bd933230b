"""kda_decode from the three ops that it joins. Legend as in the op's signature."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from k3_core.ops.kda_decode import KdaDecode
from k3_core.ops.kda_step import KdaStep
from k3_core.ops.short_conv import ShortConv


def decode_by(
    short_conv: ShortConv, kda_step: KdaStep, gated_rms_norm: Callable[..., Tensor]
) -> KdaDecode:
    """The op on implementations of the three; host and device meet where `kda_step` makes them."""

    @torch.no_grad()
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
        check_shapes(x_BWC, conv_weight_C1R, gate_BWHK, out_gate_BWHV, state_SHVK, window_SCR)
        check_both(keys_BWHK, writes_BWHV)
        (num_rows, num_tokens, num_heads, num_k), num_v = gate_BWHK.shape, out_gate_BWHV.shape[-1]
        slots = slots_B.long()
        y_TC, final_BCR = short_conv(
            x_BWC.flatten(0, 1),
            conv_weight_C1R,
            cu_seqlens_N1=torch.arange(num_rows + 1, device=x_BWC.device) * num_tokens,
            seqlens=(num_tokens,) * num_rows,
            initial_state_NCW=window_SCR[slots.clamp(min=0)],
            output_final_state=True,
        )
        sizes = (num_heads * num_k, num_heads * num_k, num_heads * num_v)
        parts = y_TC.unflatten(0, (num_rows, num_tokens)).split(sizes, dim=-1)
        q_BWHK, k_BWHK, v_BWHV = (part.unflatten(-1, (num_heads, -1)) for part in parts)
        o_BWHV = kda_step(
            *(q_BWHK, k_BWHK, v_BWHV, gate_BWHK, beta_BWH, A_log_H, dt_bias_HK),
            state_SHVK=state_SHVK,
            slots_B=slots_B,
            lower_bound=lower_bound,
            scale=scale,
            writes_BWHV=writes_BWHV,
        )
        if keys_BWHK is not None:
            keys_BWHK.copy_(k_BWHK)
        elif num_tokens:
            assert final_BCR is not None
            is_live = slots >= 0
            if not is_live.all():
                slots, final_BCR = slots[is_live], final_BCR[is_live]
            window_SCR[slots] = final_BCR.to(window_SCR.dtype)
        rows = (o_BWHV.flatten(0, 1), norm_weight_V, out_gate_BWHV.flatten(0, 1))
        return gated_rms_norm(*rows, eps=eps).view(o_BWHV.shape)

    return kda_decode


def check_both(keys_BWHK: Tensor | None, writes_BWHV: Tensor | None) -> None:
    """Raise ValueError for one of the two tensors of a verify step without the other."""
    if (keys_BWHK is None) != (writes_BWHV is None):
        raise ValueError("kda_decode: a verify step records keys and writes; give both or neither")


def check_shapes(
    x_BWC: Tensor,
    conv_weight_C1R: Tensor,
    gate_BWHK: Tensor,
    out_gate_BWHV: Tensor,
    state_SHVK: Tensor,
    window_SCR: Tensor,
) -> None:
    """Raise ValueError for what does not fit the gate; the decay, states and norm are others'."""
    (*lead, num_heads, num_k), num_v = gate_BWHK.shape, out_gate_BWHV.shape[-1]
    num_channels = num_heads * (2 * num_k + num_v)
    wanted = {
        "x": (x_BWC, (*lead, num_channels)),
        "the output gate": (out_gate_BWHV, (*lead, num_heads, num_v)),
        "the convolution weight": (conv_weight_C1R, (num_channels, 1, conv_weight_C1R.shape[-1])),
        "windows": (
            window_SCR,
            (state_SHVK.shape[0], num_channels, conv_weight_C1R.shape[-1] - 1),
        ),
    }
    for name, (x, shape) in wanted.items():
        if tuple(x.shape) != shape:
            raise ValueError(
                f"kda_decode: {name} must be {list(shape)} for a gate {list(gate_BWHK.shape)}, got "
                f"{list(x.shape)}"
            )
