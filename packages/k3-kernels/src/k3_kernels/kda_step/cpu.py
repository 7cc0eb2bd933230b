"""kda_step in plain torch: a token passes over the state three times (report 1.1, 1.8).

k and q are read against the decayed state by one product, before the write: what q would read of
the write itself is (k . q) times it. A model of small states spends the time in calls, which is why
nothing is converted or copied that need not be.
Legend: B rows, R rows that are not padded, W tokens a row, S slots, H heads, K key channels,
V value channels.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from k3_core.custom_op import custom_op
from k3_core.ops.kda_chunk.inputs import L2_EPS, log_decay
from k3_core.ops.kda_step.inputs import StepArgs, check_step
from k3_core.ops.math import math_dtype, without_autocast


@custom_op("kda_step.cpu", is_differentiable=False)
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
    if writes_BWHV is not None:
        writes_BWHV.zero_()
    if not rows or q_BWHK.shape[1] == 0:
        return torch.zeros_like(v_BWHV)

    is_full = len(rows) == len(commits)
    rows_R = None if is_full else torch.tensor(rows, device=q_BWHK.device)
    slots_R = (slots_B if rows_R is None else slots_B[rows_R]).long()
    if is_full and commits == [1] * len(rows) and writes_BWHV is None and q_BWHK.shape[1] == 1:
        return _one_token(args, state_SHVK, slots_R, lower_bound, scale)
    left = [commits[row] for row in rows]
    state_RHVK = state_SHVK.index_select(0, slots_R)
    outputs, writes = [], []
    with without_autocast(q_BWHK):
        q, k, v, gate, beta = (x if rows_R is None else x[rows_R] for x in args[:5])
        tokens = _by_token(q, k, v, gate, beta, A_log_H, dt_bias_HK, lower_bound=lower_bound)
        for w, (decay, kq, k_dot_q, v, beta) in enumerate(tokens, 1):
            state_RHVK.mul_(decay)
            k_reads, q_reads = torch.matmul(kq, state_RHVK.mT).unbind(-2)
            write_RHV = (v - k_reads).mul_(beta)
            state_RHVK.addcmul_(write_RHV.unsqueeze(-1), kq[..., :1, :])
            outputs.append(q_reads.addcmul(write_RHV, k_dot_q))
            writes.append(write_RHV)
            done = [number for number, count in enumerate(left) if count == w]
            if len(done) == len(left):
                state_SHVK.index_copy_(0, slots_R, state_RHVK)
            elif done:
                state_SHVK[slots_R[done]] = state_RHVK[done]
    if writes_BWHV is not None:
        writes_BWHV[slice(None) if rows_R is None else rows_R] = torch.stack(writes, dim=1)
    o_RWHV = torch.stack(outputs, dim=1).mul_(q_BWHK.shape[3] ** -0.5 if scale is None else scale)
    if rows_R is None:
        return o_RWHV.to(v_BWHV.dtype)
    return torch.zeros_like(v_BWHV).index_copy_(0, rows_R, o_RWHV.to(v_BWHV.dtype))


def _one_token(
    args: StepArgs,
    state_SHVK: Tensor,
    slots_B: Tensor,
    lower_bound: float | None,
    scale: float | None,
) -> Tensor:
    """The step of plain decoding: one token of every row, kept."""
    dtype, num_keys = math_dtype(args[0]), args[0].shape[3]
    with without_autocast(state_SHVK):
        k_B1HK, q_B1HK, v_B1HV, gate_B1HK, beta_B1H, A_log_H, dt_bias_HK = (
            x if x.dtype == dtype else x.to(dtype) for x in (args[1], args[0], *args[2:])
        )
        kq_BH2K = torch.cat((k_B1HK, q_B1HK), dim=1).transpose(1, 2)
        squares_BH2 = torch.linalg.vecdot(kq_BH2K, kq_BH2K)
        kq_BH2K = kq_BH2K * squares_BH2.add_(L2_EPS).rsqrt_().unsqueeze(-1)
        decay_BH1K = log_decay(gate_B1HK, A_log_H, dt_bias_HK, lower_bound).exp_().transpose(1, 2)
        state_BHVK = state_SHVK.index_select(0, slots_B).mul_(decay_BH1K)
        k_reads_BHV, q_reads_BHV = (state_BHVK @ kq_BH2K.mT).unbind(-1)
        write_BHV = (v_B1HV[:, 0] - k_reads_BHV).mul_(beta_B1H.sigmoid().mT)
        k_BHK, q_BHK = kq_BH2K.unbind(-2)
        state_BHVK.addcmul_(write_BHV.unsqueeze(-1), k_BHK.unsqueeze(-2))
        state_SHVK.index_copy_(0, slots_B, state_BHVK)
        k_dot_q_BH1 = torch.linalg.vecdot(k_BHK, q_BHK).unsqueeze(-1)
        o_BHV = torch.addcmul(q_reads_BHV, write_BHV, k_dot_q_BH1)
        o_BHV.mul_(num_keys**-0.5 if scale is None else scale)
    return o_BHV.to(args[2].dtype).unsqueeze(1)


def _by_token(
    q_RWHK: Tensor,
    k_RWHK: Tensor,
    v_RWHV: Tensor,
    gate_RWHK: Tensor,
    beta_RWH: Tensor,
    A_log_H: Tensor,
    dt_bias_HK: Tensor,
    *,
    lower_bound: float | None,
) -> Iterator[tuple[Tensor, ...]]:
    """For each token decay [R, H, 1, K], k and q [R, H, 2, K], k . q, v [R, H, V], beta."""
    dtype = math_dtype(q_RWHK)
    kq_RWH2K = torch.stack((k_RWHK, q_RWHK), dim=-2)
    if kq_RWH2K.dtype != dtype:
        kq_RWH2K, v_RWHV = kq_RWH2K.to(dtype), v_RWHV.to(dtype)
    squares = torch.linalg.vecdot(kq_RWH2K, kq_RWH2K)
    kq_RWH2K.mul_(squares.add_(L2_EPS).rsqrt_().unsqueeze(-1))
    k_dot_q = torch.linalg.vecdot(kq_RWH2K[..., 0, :], kq_RWH2K[..., 1, :])
    log = log_decay(gate_RWHK.to(dtype), A_log_H.to(dtype), dt_bias_HK.to(dtype), lower_bound)
    beta = beta_RWH.to(dtype).sigmoid()
    columns = (
        log.exp_().unsqueeze(-2),
        kq_RWH2K,
        k_dot_q.unsqueeze(-1),
        v_RWHV,
        beta.unsqueeze(-1),
    )
    return zip(*(x.unbind(1) for x in columns), strict=True)
