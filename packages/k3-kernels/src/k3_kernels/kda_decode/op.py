"""kda_decode by Triton: convolution, SiLU, kda_step and gated_rms_norm of decode rows (report 1.8).

One token a row is one launch, which does not round o before the norm; several tokens are three,
since every block of a state would have to repeat the convolution of q and k for each token.
Legend: B rows, W tokens a row, S slots, H heads, K key, V value channels, C = H (2 K + V) channels,
R = taps - 1 rows of history.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from k3_core.custom_op import custom_op
from k3_core.ops.kda_chunk.inputs import check_inputs, check_state
from k3_core.ops.kda_decode.compose import check_both, check_shapes
from k3_kernels.early import early_launch
from k3_kernels.gated_rms_norm.op import gated_rms_norm
from k3_kernels.kda_chunk.config import block_width
from k3_kernels.kda_chunk.op import check_bound, default_precision
from k3_kernels.kda_decode.fused import decode_kernel
from k3_kernels.kda_decode.window import conv_kernel
from k3_kernels.kda_step.config import StepBlocks, choose_decode_blocks
from k3_kernels.kda_step.op import check_pool, check_records, kda_step
from k3_kernels.launch import last_contiguous

MAX_REGISTERS = 128
"""Of a thread: four programs of four warps share a multiprocessor, 512 of them run at once."""


def _check_keys(keys_BWHK: Tensor, gate_BWHK: Tensor, x_BWC: Tensor) -> None:
    if keys_BWHK.shape != gate_BWHK.shape or keys_BWHK.stride(-1) != 1:
        raise ValueError(
            f"kda_decode: the recorded k must be {list(gate_BWHK.shape)}, heads contiguous, got "
            f"{list(keys_BWHK.shape)} with strides {keys_BWHK.stride()}"
        )
    if keys_BWHK.dtype != x_BWC.dtype or keys_BWHK.device != x_BWC.device:
        raise TypeError(
            f"kda_decode: the recorded k is {keys_BWHK.dtype} on {keys_BWHK.device}, expected "
            f"{x_BWC.dtype} on {x_BWC.device}, as x"
        )


@custom_op("kda_decode.triton", is_differentiable=False)
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
    num_commit_B: Tensor | None = None,
    keys_BWHK: Tensor | None = None,
    writes_BWHV: Tensor | None = None,
    blocks: StepBlocks | None = None,
) -> Tensor:
    """y [B, W, H, V]; arguments and results as `k3_core.ops.kda_decode.KdaDecode`.

    The pools move by the first `num_commit_B` tokens of each row (None: all W; not for a verify
    step); `blocks` replaces what the table chooses.
    """
    (num_rows, num_tokens, num_heads, num_k), num_v = gate_BWHK.shape, out_gate_BWHV.shape[-1]
    decay = (gate_BWHK, beta_BWH, A_log_H, dt_bias_HK)
    check_inputs("kda_decode", gate_BWHK, gate_BWHK, gate_BWHK, *decay, lower_bound)
    bound = check_bound("kda_decode", lower_bound)
    default_precision("kda_decode", x_BWC.dtype)
    num_slots = state_SHVK.shape[0]
    check_state("kda_decode", "state", state_SHVK, (num_slots, num_heads, num_v, num_k), x_BWC)
    counts = ("num_commit", num_commit_B)
    check_pool("kda_decode", state_SHVK, slots_B, counts, (num_rows, num_tokens))
    check_shapes(x_BWC, conv_weight_C1R, gate_BWHK, out_gate_BWHV, state_SHVK, window_SCR)
    if not window_SCR[:1].is_contiguous():
        raise ValueError(
            f"kda_decode: convolution windows must be contiguous each, got strides "
            f"{window_SCR.stride()}"
        )
    if tuple(norm_weight_V.shape) != (num_v,):
        raise ValueError(
            f"kda_decode: the norm weight must be [{num_v}], got {norm_weight_V.shape}"
        )
    check_both(keys_BWHK, writes_BWHV)
    if keys_BWHK is not None and writes_BWHV is not None:
        _check_keys(keys_BWHK, gate_BWHK, x_BWC)
        check_records("kda_decode", writes_BWHV, out_gate_BWHV, num_commit_B)
    if out_gate_BWHV.numel() == 0:
        return torch.empty_like(out_gate_BWHV)
    x, weight = last_contiguous(x_BWC), conv_weight_C1R.contiguous()
    if num_tokens > 1 or num_commit_B is not None or keys_BWHK is not None:
        first_key = num_heads * num_k
        qkv_BWC = _convolve(x, weight, window_SCR, slots_B, num_commit_B, keys_BWHK, first_key)
        parts = qkv_BWC.split((first_key, first_key, num_heads * num_v), dim=-1)
        q_BWHK, k_BWHK, v_BWHV = (part.unflatten(-1, (num_heads, -1)) for part in parts)
        o_BWHV = kda_step(
            q_BWHK,
            k_BWHK,
            v_BWHV,
            *decay,
            state_SHVK=state_SHVK,
            slots_B=slots_B,
            lower_bound=lower_bound,
            scale=scale,
            num_commit_B=num_commit_B,
            writes_BWHV=writes_BWHV,
            blocks=blocks,
        )
        rows = (o_BWHV.flatten(0, 1), norm_weight_V, out_gate_BWHV.flatten(0, 1))
        return gated_rms_norm(*rows, eps=eps).view(o_BWHV.shape)
    y_BWHV = torch.empty_like(out_gate_BWHV, memory_format=torch.contiguous_format)
    gate, out_gate = last_contiguous(gate_BWHK), last_contiguous(out_gate_BWHV)
    blocks = blocks or choose_decode_blocks(num_k, num_v, num_rows * num_heads)
    num_taps = weight.shape[2]
    decode_kernel[(num_rows * num_heads,)](
        x,
        weight,
        gate,
        beta_BWH,
        A_log_H.contiguous(),
        dt_bias_HK.contiguous(),
        out_gate,
        norm_weight_V.contiguous(),
        y_BWHV,
        state_SHVK,
        window_SCR,
        slots_B,
        num_heads,
        num_slots,
        bound,
        num_k**-0.5 if scale is None else scale,
        eps,
        x.stride(0),
        *(s for t in (gate, beta_BWH, out_gate) for s in (t.stride(0), t.stride(2))),
        *state_SHVK.stride()[:2],
        window_SCR.stride(0),
        slots_B.stride(0),
        K=num_k,
        V=num_v,
        BK=block_width(num_k),
        BV=blocks.values,
        NUM_BLOCKS=-(-num_v // blocks.values),
        WHOLE=block_width(num_v),
        TAPS=num_taps,
        LANES=choose_lanes(num_k, blocks),
        **early_launch(num_rows, x.device),
        num_warps=blocks.warps,
        maxnreg=MAX_REGISTERS,
    )
    return y_BWHV


def choose_lanes(num_k: int, blocks: StepBlocks) -> int:
    """Key channels of a row of the state that neighbouring threads share, four each.

    With 32, eight threads hold a row, and its sums take three exchanges instead of five. With more
    threads than channels that would leave each thread many channels of everything else too.
    """
    width = block_width(num_k)
    return min(32, width) if 32 * blocks.warps <= width else width


def _convolve(
    x_BWC: Tensor,
    weight_C1R: Tensor,
    window_SCR: Tensor,
    slots_B: Tensor,
    num_commit_B: Tensor | None,
    keys_BWHK: Tensor | None,
    first_key: int,
) -> Tensor:
    """SiLU of the convolution [B, W, C]; moves the windows, or records k where keys are given."""
    num_rows, num_tokens, num_channels = x_BWC.shape
    y_BWC = torch.empty_like(x_BWC, memory_format=torch.contiguous_format)
    keys = y_BWC[..., None] if keys_BWHK is None else keys_BWHK
    commit = slots_B if num_commit_B is None else num_commit_B
    num_taps, block = weight_C1R.shape[2], min(256, triton.next_power_of_2(num_channels))
    conv_kernel[(num_rows * triton.cdiv(num_channels, block),)](
        x_BWC,
        weight_C1R,
        y_BWC,
        keys,
        window_SCR,
        slots_B,
        commit,
        num_channels,
        window_SCR.shape[0],
        num_tokens,
        first_key,
        *x_BWC.stride()[:2],
        *keys.stride()[:3],
        window_SCR.stride(0),
        slots_B.stride(0),
        commit.stride(0),
        K=keys.shape[-1],
        TAPS=num_taps,
        BTAPS=triton.next_power_of_2(num_taps),
        BC=block,
        HAS_COMMIT=num_commit_B is not None,
        HAS_KEYS=keys_BWHK is not None,
        num_warps=4,
    )
    return y_BWC
