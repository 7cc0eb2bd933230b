"""kda_replay by the recurrence without reads (report 1.1, 1.8).

Legend: B rows, N rows that are not padded, W tokens a row, S slots, H heads, K key, V value
channels, C channels of the convolution, R inputs of its window.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3_core.custom_op import custom_op
from k3_core.ops.kda_chunk.inputs import l2_normalize, log_decay
from k3_core.ops.kda_replay.inputs import check_replay
from k3_core.ops.math import math_dtype


@custom_op("kda_replay.reference", is_differentiable=False)
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
    args = (k_BWHK, gate_BWHK, writes_BWHV, A_log_H, dt_bias_HK)
    rows, counts = check_replay(
        args, state_SHVK, slots_B, num_accepted_B, lower_bound, x_BWC, window_SCR
    )
    dtype = math_dtype(k_BWHK)
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
