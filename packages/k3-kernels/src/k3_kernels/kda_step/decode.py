"""kda_decode: convolution, SiLU, kda_step and gated_rms_norm of decode rows in one launch.

The same as `short_conv`, `kda_step` and `gated_rms_norm` of k3_core one after the other, without
rounding q, v and o to the activation dtype in between. Not an op of the registry: a layer calls
it where it holds paged states and convolution windows (report 1.8).
Legend: B rows, W tokens a row, S slots, H heads, K key, V value channels, C = H (2 K + V) channels,
R = taps - 1 rows of history.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from k3_core.ops.kda_chunk.inputs import check_inputs, check_state
from k3_kernels.kda_chunk.config import block_width
from k3_kernels.kda_chunk.op import check_bound, default_precision
from k3_kernels.kda_step.config import StepBlocks, choose_decode_blocks
from k3_kernels.kda_step.fused import decode_kernel
from k3_kernels.kda_step.op import check_pool, check_records
from k3_kernels.launch import last_contiguous


def _check_conv(
    x_BWC: Tensor, weight_C1R: Tensor, window_SCR: Tensor, norm_V: Tensor, shape: tuple[int, ...]
) -> None:
    num_channels, num_slots, num_v = shape
    if x_BWC.dim() != 3 or x_BWC.shape[2] != num_channels:
        raise ValueError(
            f"kda_decode: x must be [B, W, {num_channels}] (q, k and v of all heads), got "
            f"{list(x_BWC.shape)}"
        )
    if weight_C1R.dim() != 3 or weight_C1R.shape[:2] != (num_channels, 1):
        raise ValueError(
            f"kda_decode: the convolution weight must be [{num_channels}, 1, taps], got "
            f"{list(weight_C1R.shape)}"
        )
    window = (num_slots, num_channels, weight_C1R.shape[2] - 1)
    if tuple(window_SCR.shape) != window or not window_SCR[:1].is_contiguous():
        raise ValueError(
            f"kda_decode: the convolution windows must be {list(window)}, each contiguous, got "
            f"{list(window_SCR.shape)} with strides {window_SCR.stride()}"
        )
    if tuple(norm_V.shape) != (num_v,):
        raise ValueError(f"kda_decode: the norm weight must be [{num_v}], got {norm_V.shape}")


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
    records: tuple[Tensor, Tensor] | None = None,
    blocks: StepBlocks | None = None,
) -> Tensor:
    """y [B, W, H, V] in the output gate's dtype, before the output projection.

    x: projected q, k, v before the convolution, side by side. State and window pools are updated
    in place with the first `num_commit_B` tokens of each row (None: all W). Slots and what a GPU
    cannot check are as for kda_step. Raises ValueError or TypeError for what does not fit.

    `records` makes the call a verify step: neither pool changes, and the two tensors receive k
    after the convolution [B, W, H, K] (x's dtype) and the writes [B, W, H, V] (float32). With them,
    gate and x, `kda_replay` moves states and windows. `blocks` replaces what the table chooses.
    """
    (num_rows, num_tokens, num_heads, num_k), num_v = gate_BWHK.shape, out_gate_BWHV.shape[-1]
    decay = (gate_BWHK, beta_BWH, A_log_H, dt_bias_HK)
    check_inputs("kda_decode", gate_BWHK, gate_BWHK, gate_BWHK, *decay, lower_bound)
    bound = check_bound("kda_decode", lower_bound)
    default_precision("kda_decode", x_BWC.dtype)
    pool_shape = (state_SHVK.shape[0], num_heads, num_v, num_k)
    check_state("kda_decode", "state", state_SHVK, pool_shape, x_BWC)
    counts = ("num_commit", num_commit_B)
    check_pool("kda_decode", state_SHVK, slots_B, counts, (num_rows, num_tokens))
    num_channels = num_heads * (2 * num_k + num_v)
    sizes = (num_channels, state_SHVK.shape[0], num_v)
    _check_conv(x_BWC, conv_weight_C1R, window_SCR, norm_weight_V, sizes)
    if records is not None:
        _check_keys(records[0], gate_BWHK, x_BWC)
        check_records("kda_decode", records[1], out_gate_BWHV, num_commit_B)
    y_BWHV = torch.empty_like(out_gate_BWHV, memory_format=torch.contiguous_format)
    if y_BWHV.numel() == 0:
        return y_BWHV
    scratch = torch.empty_like(y_BWHV, dtype=torch.float32)
    x, gate, out_gate = map(last_contiguous, (x_BWC, gate_BWHK, out_gate_BWHV))
    commit = slots_B if num_commit_B is None else num_commit_B
    keys, writes = records or (y_BWHV, scratch)
    num_taps = conv_weight_C1R.shape[2]
    blocks = blocks or choose_decode_blocks(num_k, num_v, num_rows * num_heads, num_tokens)
    decode_kernel[(num_rows * num_heads,)](
        x,
        conv_weight_C1R.contiguous(),
        gate,
        beta_BWH,
        A_log_H.contiguous(),
        dt_bias_HK.contiguous(),
        out_gate,
        norm_weight_V.contiguous(),
        y_BWHV,
        scratch,
        state_SHVK,
        window_SCR,
        slots_B,
        commit,
        keys,
        writes,
        num_heads,
        state_SHVK.shape[0],
        num_tokens,
        bound,
        num_k**-0.5 if scale is None else scale,
        eps,
        *x.stride()[:2],
        *(s for y in (gate, beta_BWH, out_gate, keys, writes) for s in y.stride()[:3]),
        *state_SHVK.stride()[:2],
        window_SCR.stride(0),
        slots_B.stride(0),
        commit.stride(0),
        K=num_k,
        V=num_v,
        BK=block_width(num_k),
        BV=blocks.values,
        NUM_BLOCKS=-(-num_v // blocks.values),
        WHOLE=block_width(num_v),
        TAPS=num_taps,
        BTAPS=triton.next_power_of_2(num_taps),
        IS_SINGLE=num_tokens == 1,
        HAS_COMMIT=num_commit_B is not None,
        HAS_RECORDS=records is not None,
        num_warps=blocks.warps,
    )
    return y_BWHV
