"""kda_step, vectorised over rows and looped over tokens (report 1.1, 1.8).

Legend: B rows, R rows that are not padded, W tokens a row, S slots, H heads, K key channels,
V value channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3_core.custom_op import custom_op
from k3_core.ops.kda_chunk.inputs import l2_normalize, log_decay
from k3_core.ops.kda_chunk.reference import recorded_step
from k3_core.ops.kda_step.inputs import check_step
from k3_core.ops.math import math_dtype


@custom_op("kda_step.reference", is_differentiable=False)
@torch.no_grad()
def kda_step(
    q_BWHK: Tensor,
    k_BWHK: Tensor,
    v_BWHV: Tensor,
    gate_BWHK: Tensor,
    beta_BWH: Tensor,
    A_log_H: Tensor,
    dt_bias_HK: Tensor,
    *,
    state_SHVK: Tensor,
    slots_B: Tensor,
    lower_bound: float | None,
    scale: float | None = None,
    num_commit_B: Tensor | None = None,
    writes_BWHV: Tensor | None = None,
) -> Tensor:
    """Decode W tokens a row on pooled states; arguments as `k3_core.ops.kda_step.KdaStep`."""
    args = (q_BWHK, k_BWHK, v_BWHV, gate_BWHK, beta_BWH, A_log_H, dt_bias_HK)
    rows, commits = check_step(args, state_SHVK, slots_B, lower_bound, num_commit_B, writes_BWHV)
    num_rows, num_tokens, _, num_k = q_BWHK.shape
    dtype = math_dtype(q_BWHK)
    if writes_BWHV is not None:
        writes_BWHV.zero_()
    if not rows or num_tokens == 0:
        return torch.zeros_like(v_BWHV)

    is_full = len(rows) == num_rows
    rows_R = torch.tensor(rows, device=q_BWHK.device)
    slots_R = (slots_B if is_full else slots_B[rows_R]).long()
    with torch.autocast(q_BWHK.device.type, enabled=False):
        q, k, v, gate, beta = ((x if is_full else x[rows_R]).to(dtype) for x in args[:5])
        q = l2_normalize(q) * (num_k**-0.5 if scale is None else scale)
        k = l2_normalize(k)
        g = log_decay(gate, A_log_H.to(dtype), dt_bias_HK.to(dtype), lower_bound)
        beta = torch.sigmoid(beta)
        limits_R = torch.tensor([commits[r] for r in rows], device=q.device).view(-1, 1, 1, 1)
        state_RHVK = committed_RHVK = state_SHVK.index_select(0, slots_R)
        outputs, writes = [], []
        for w in range(num_tokens):
            state_RHVK, o_RHV, write_RHV = recorded_step(
                state_RHVK, q[:, w], k[:, w], v[:, w], g[:, w], beta[:, w]
            )
            outputs.append(o_RHV)
            writes.append(write_RHV)
            committed_RHVK = torch.where(limits_R > w, state_RHVK, committed_RHVK)
    if writes_BWHV is None:
        state_SHVK.index_copy_(0, slots_R, committed_RHVK)
    else:
        writes_BWHV.index_copy_(0, rows_R, torch.stack(writes, dim=1))
    o_RWHV = torch.stack(outputs, dim=1).to(v_BWHV.dtype)
    if is_full:
        return o_RWHV
    return torch.zeros_like(v_BWHV).index_copy_(0, rows_R, o_RWHV)
