"""kda_replay on Triton: one launch for states, one for windows; nothing waits for the device.

What a GPU cannot be asked is contained, as in kda_step: a slot outside the pool or a count outside
1..W changes nothing.
Legend: B rows, W tokens a row, S slots, H heads, K key, V value channels, C channels of the
convolution, R = taps - 1.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from k3_core.custom_op import custom_op
from k3_core.ops.kda_chunk.inputs import check_inputs, check_state
from k3_core.ops.kda_replay.inputs import check_windows
from k3_core.ops.kda_step.inputs import check_writes
from k3_kernels.kda_chunk.config import block_width
from k3_kernels.kda_chunk.op import check_bound, default_precision
from k3_kernels.kda_replay.kernel import replay_kernel, window_kernel
from k3_kernels.kda_step.config import choose_step_blocks
from k3_kernels.kda_step.op import check_pool
from k3_kernels.launch import last_contiguous


@custom_op("kda_replay.triton", is_differentiable=False)
@torch.no_grad()
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
    decay_args = (gate_BWHK, gate_BWHK[..., 0], A_log_H, dt_bias_HK)
    check_inputs("kda_replay", k_BWHK, k_BWHK, k_BWHK, *decay_args, lower_bound)
    bound = check_bound("kda_replay", lower_bound)
    default_precision("kda_replay", k_BWHK.dtype)
    (num_rows, num_tokens, num_heads, num_k), num_v = k_BWHK.shape, writes_BWHV.shape[-1]
    num_slots = state_SHVK.shape[0]
    shape = (*k_BWHK.shape[:3], num_v)
    check_writes("kda_replay", writes_BWHV, shape, torch.float32, k_BWHK.device)
    check_state("kda_replay", "state", state_SHVK, (num_slots, num_heads, num_v, num_k), k_BWHK)
    check_windows(x_BWC, window_SCR, num_slots, (num_rows, num_tokens))
    counts = ("num_accepted", num_accepted_B)
    check_pool("kda_replay", state_SHVK, slots_B, counts, (num_rows, num_tokens))
    if num_rows == 0 or num_tokens == 0:
        return
    blocks = choose_step_blocks(num_k, num_v, num_rows * num_heads)
    num_blocks = -(-num_v // blocks.values)
    records = [last_contiguous(x) for x in (k_BWHK, gate_BWHK, writes_BWHV)]
    replay_kernel[(num_rows * num_heads * num_blocks,)](
        *records,
        A_log_H.contiguous(),
        dt_bias_HK.contiguous(),
        state_SHVK,
        slots_B,
        num_accepted_B,
        num_heads,
        num_slots,
        num_tokens,
        bound,
        *(s for x in records for s in x.stride()[:3]),
        *state_SHVK.stride()[:2],
        slots_B.stride(0),
        num_accepted_B.stride(0),
        K=num_k,
        V=num_v,
        BK=block_width(num_k),
        BV=blocks.values,
        NUM_BLOCKS=num_blocks,
        num_warps=blocks.warps,
    )
    if x_BWC is not None and window_SCR is not None:
        _move_windows(x_BWC, window_SCR, slots_B, num_accepted_B)


def _move_windows(
    x_BWC: Tensor, window_SCR: Tensor, slots_B: Tensor, num_accepted_B: Tensor
) -> None:
    num_slots, num_channels, num_history = window_SCR.shape
    if not window_SCR[:1].is_contiguous():
        raise ValueError(
            f"kda_replay: each [C, R] window must be contiguous, got strides {window_SCR.stride()}"
        )
    x = last_contiguous(x_BWC)
    block = min(256, triton.next_power_of_2(num_channels))
    window_kernel[(x.shape[0] * triton.cdiv(num_channels, block),)](
        x,
        window_SCR,
        slots_B,
        num_accepted_B,
        num_channels,
        num_slots,
        x.shape[1],
        *x.stride()[:2],
        window_SCR.stride(0),
        slots_B.stride(0),
        num_accepted_B.stride(0),
        TAPS=num_history + 1,
        BTAPS=triton.next_power_of_2(num_history + 1),
        BC=block,
        num_warps=4,
    )
