"""kda_step, vectorised over rows and looped over tokens (report 1.1, 1.8).

Legend: B rows, R rows that are not padded, W tokens a row, S slots, H heads, K key channels,
V value channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3_core.ops.kda_chunk.inputs import check_inputs, check_state, l2_normalize, log_decay
from k3_core.ops.kda_chunk.reference import delta_step
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
) -> Tensor:
    """Decode W tokens a row on pooled states; arguments as `k3_core.ops.kda_step.KdaStep`."""
    args = (q_BWHK, k_BWHK, v_BWHV, gate_BWHK, beta_BWH, A_log_H, dt_bias_HK)
    check_inputs("kda_step", *args, lower_bound)
    (num_rows, num_tokens, num_heads, num_k), num_v = q_BWHK.shape, v_BWHV.shape[-1]
    shape = (state_SHVK.shape[0], num_heads, num_v, num_k)
    check_state("kda_step", "state", state_SHVK, shape, q_BWHK)
    rows = _live_rows(slots_B, num_rows, state_SHVK.shape[0])
    commits = _commit_counts(num_commit_B, num_rows, num_tokens)
    if not rows or num_tokens == 0:
        return torch.zeros_like(v_BWHV)

    is_full = len(rows) == num_rows
    rows_R = torch.tensor(rows, device=q_BWHK.device)
    slots_R = (slots_B if is_full else slots_B[rows_R]).long()
    dtype = math_dtype(q_BWHK)
    with torch.autocast(q_BWHK.device.type, enabled=False):
        q, k, v, gate, beta = ((x if is_full else x[rows_R]).to(dtype) for x in args[:5])
        q = l2_normalize(q) * (num_k**-0.5 if scale is None else scale)
        k = l2_normalize(k)
        g = log_decay(gate, A_log_H.to(dtype), dt_bias_HK.to(dtype), lower_bound)
        beta = torch.sigmoid(beta)
        limits_R = torch.tensor([commits[r] for r in rows], device=q.device).view(-1, 1, 1, 1)
        state_RHVK = committed_RHVK = state_SHVK.index_select(0, slots_R)
        outputs = []
        for w in range(num_tokens):
            state_RHVK, o_RHV = delta_step(
                state_RHVK, q[:, w], k[:, w], v[:, w], g[:, w], beta[:, w]
            )
            outputs.append(o_RHV)
            committed_RHVK = torch.where(limits_R > w, state_RHVK, committed_RHVK)
    state_SHVK.index_copy_(0, slots_R, committed_RHVK)
    o_RWHV = torch.stack(outputs, dim=1).to(v_BWHV.dtype)
    if is_full:
        return o_RWHV
    return torch.zeros_like(v_BWHV).index_copy_(0, rows_R, o_RWHV)


def _live_rows(slots_B: Tensor, num_rows: int, num_slots: int) -> list[int]:
    """Rows whose slot is not -1; one read of the slots on the host checks them all."""
    if tuple(slots_B.shape) != (num_rows,) or slots_B.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"kda_step: slots must be int32 or int64 [{num_rows}], got {slots_B.dtype} "
            f"{list(slots_B.shape)}"
        )
    slots = slots_B.tolist()
    for slot in slots:
        if not -1 <= slot < num_slots:
            raise IndexError(
                f"kda_step: slot {slot} is outside the pool of {num_slots}; "
                "use 0 to the pool size - 1, or -1 for a padded row"
            )
    rows = [row for row, slot in enumerate(slots) if slot >= 0]
    if len({slots[row] for row in rows}) != len(rows):
        raise ValueError(f"kda_step: a slot is used by two rows: {slots}")
    return rows


def _commit_counts(num_commit_B: Tensor | None, num_rows: int, num_tokens: int) -> list[int]:
    if num_commit_B is None:
        return [num_tokens] * num_rows
    if tuple(num_commit_B.shape) != (num_rows,) or num_commit_B.is_floating_point():
        raise ValueError(
            f"kda_step: num_commit must be an integer tensor [{num_rows}], got "
            f"{num_commit_B.dtype} {list(num_commit_B.shape)}"
        )
    counts: list[int] = num_commit_B.tolist()
    for count in counts:
        if not 0 <= count <= num_tokens:
            raise ValueError(f"kda_step: num_commit {count} is outside 0..{num_tokens}")
    return counts
