"""kda_step in plain torch: each token passes over the state three times (report 1.1, 1.8).

k and q are read against the decayed state by one product, before the write: what q would read of
the write itself is (k . q) times it.
Legend: B rows, R rows that are not padded, W tokens a row, S slots, H heads, K key channels,
V value channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3_core.ops.kda_chunk.inputs import l2_normalize, log_decay
from k3_core.ops.kda_step.inputs import check_step
from k3_core.ops.math import math_dtype


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
    num_tokens, num_k, dtype = q_BWHK.shape[1], q_BWHK.shape[3], math_dtype(q_BWHK)
    if writes_BWHV is not None:
        writes_BWHV.zero_()
    if not rows or num_tokens == 0:
        return torch.zeros_like(v_BWHV)

    is_full = len(rows) == len(commits)
    rows_R = torch.tensor(rows, device=q_BWHK.device)
    slots_R = (slots_B if is_full else slots_B[rows_R]).long()
    state_RHVK = state_SHVK.index_select(0, slots_R)
    left = [commits[row] for row in rows]
    outputs, writes = [], []
    with torch.autocast(q_BWHK.device.type, enabled=False):
        q, k, v, gate, beta = ((x if is_full else x[rows_R]).to(dtype) for x in args[:5])
        kq_2RWHK = l2_normalize(torch.stack((k, q)))
        kq_2RWHK[1] *= num_k**-0.5 if scale is None else scale
        k = kq_2RWHK[0]
        k_dot_q = torch.linalg.vecdot(k, kq_2RWHK[1]).unsqueeze(-1)
        log_decays = log_decay(gate, A_log_H.to(dtype), dt_bias_HK.to(dtype), lower_bound)
        decays, beta = log_decays.exp_(), beta.sigmoid().unsqueeze(-1)
        for w in range(num_tokens):
            state_RHVK.mul_(decays[:, w].unsqueeze(-2))
            reads = torch.matmul(state_RHVK, kq_2RWHK[:, :, w].permute(1, 2, 3, 0))
            write_RHV = (v[:, w] - reads[..., 0]).mul_(beta[:, w])
            state_RHVK.addcmul_(write_RHV.unsqueeze(-1), k[:, w].unsqueeze(-2))
            outputs.append(torch.addcmul(reads[..., 1], write_RHV, k_dot_q[:, w]))
            writes.append(write_RHV)
            done = [number for number, tokens in enumerate(left) if tokens == w + 1]
            if len(done) == len(left):
                state_SHVK.index_copy_(0, slots_R, state_RHVK)
            elif done:
                state_SHVK[slots_R[done]] = state_RHVK[done]
    if writes_BWHV is not None:
        writes_BWHV.index_copy_(0, rows_R, torch.stack(writes, dim=1))
    o_RWHV = torch.stack(outputs, dim=1).to(v_BWHV.dtype)
    return o_RWHV if is_full else torch.zeros_like(v_BWHV).index_copy_(0, rows_R, o_RWHV)
