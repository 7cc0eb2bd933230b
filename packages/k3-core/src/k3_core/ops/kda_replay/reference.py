"""kda_replay by the recurrence without reads (report 1.1, 1.8).

Legend: B rows, N rows that are not padded, W tokens a row, S slots, H heads, K key, V value
channels, C channels of the convolution, R inputs of its window.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3_core.ops.kda_chunk.inputs import check_inputs, check_state, l2_normalize, log_decay
from k3_core.ops.kda_replay.inputs import check_windows
from k3_core.ops.kda_step.inputs import check_writes, live_rows, token_counts
from k3_core.ops.math import math_dtype


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
    (num_rows, num_tokens, num_heads, num_k), num_v = k_BWHK.shape, writes_BWHV.shape[-1]
    num_slots, dtype = state_SHVK.shape[0], math_dtype(k_BWHK)
    check_writes("kda_replay", writes_BWHV, (*k_BWHK.shape[:3], num_v), dtype, k_BWHK.device)
    shape = (num_slots, num_heads, num_v, num_k)
    check_state("kda_replay", "state", state_SHVK, shape, k_BWHK)
    check_windows(x_BWC, window_SCR, num_slots, (num_rows, num_tokens))
    rows = live_rows("kda_replay", slots_B, num_rows, num_slots)
    counts = token_counts("kda_replay", "num_accepted", num_accepted_B, num_rows, num_tokens)

    k = l2_normalize(k_BWHK.to(dtype))
    decay = log_decay(
        gate_BWHK.to(dtype), A_log_H.to(dtype), dt_bias_HK.to(dtype), lower_bound
    ).exp()
    slots: list[int] = slots_B.tolist()
    for row in rows:
        slot, count = slots[row], counts[row]
        for w in range(count):
            write_HVK = writes_BWHV[row, w].unsqueeze(-1) * k[row, w].unsqueeze(-2)
            state_SHVK[slot] = state_SHVK[slot] * decay[row, w].unsqueeze(-2) + write_HVK
        if count and x_BWC is not None and window_SCR is not None:
            inputs_CL = torch.cat((window_SCR[slot], x_BWC[row, :count].t()), dim=1)
            window_SCR[slot] = inputs_CL[:, inputs_CL.shape[1] - window_SCR.shape[2] :]
