"""kda_segment by way of kda_chunk: the map's columns are states that the recurrence can carry.

The rows of a state evolve independently, each driven by its own value channel. So running
kda_chunk on V + K value channels, from the state [0; I] with zero values in the last K, ends in
[S; M] exactly (report 1.7: one scan seeded with zero and one with the identity).
Legend: T packed tokens, N stretches, H heads, K key channels, V value channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from k3_core.ops.kda_chunk import KdaChunk
from k3_core.ops.kda_segment import AffineMap
from k3_core.ops.math import math_dtype


def augment(k_THK: Tensor, v_THV: Tensor, num_stretches: int) -> tuple[Tensor, Tensor]:
    """Values [T, H, V + K] and initial states [N, H, V + K, K]."""
    (num_tokens, num_heads, num_k), num_v = k_THK.shape, v_THV.shape[-1]
    values = torch.cat([v_THV, v_THV.new_zeros(num_tokens, num_heads, num_k)], dim=-1)
    like: dict[str, Any] = {"dtype": math_dtype(k_THK), "device": k_THK.device}
    seed_VK = torch.cat([torch.zeros(num_v, num_k, **like), torch.eye(num_k, **like)])
    return values, seed_VK.expand(num_stretches, num_heads, -1, -1).contiguous()


def split(final_NHVK: Tensor, num_v: int) -> AffineMap:
    """The map from final states [N, H, V + K, K]."""
    return final_NHVK[..., num_v:, :], final_NHVK[..., :num_v, :]


def segment_by_chunk(
    kda_chunk: KdaChunk,
    k_THK: Tensor,
    v_THV: Tensor,
    gate_THK: Tensor,
    beta_TH: Tensor,
    A_log_H: Tensor,
    dt_bias_HK: Tensor,
    *,
    lower_bound: float | None,
    cu_seqlens_N1: Tensor,
    seqlens: tuple[int, ...] | None = None,
) -> AffineMap:
    """(M_NHKK, S_NHVK) with any implementation of kda_chunk that takes and returns states."""
    values, seed_NHVK = augment(k_THK, v_THV, cu_seqlens_N1.numel() - 1)
    _, final = kda_chunk(
        k_THK,  # the reads are not used, so any queries do
        k_THK,
        values,
        gate_THK,
        beta_TH,
        A_log_H,
        dt_bias_HK,
        lower_bound=lower_bound,
        cu_seqlens_N1=cu_seqlens_N1,
        seqlens=seqlens,
        initial_state_NHVK=seed_NHVK,
        output_final_state=True,
    )
    assert final is not None
    return split(final, v_THV.shape[-1])
