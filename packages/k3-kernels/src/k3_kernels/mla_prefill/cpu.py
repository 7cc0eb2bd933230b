"""mla_prefill by torch's scaled_dot_product_attention, one sequence at a time."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from k3_core.custom_op import custom_op
from k3_core.ops.math import math_dtype
from k3_core.ops.mla_prefill import reference
from k3_core.ops.varlen import host_lengths


@custom_op("mla_prefill.cpu")
def mla_prefill(
    q_THD: Tensor,
    k_SHD: Tensor,
    v_SHV: Tensor,
    *,
    scale: float,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqlens_q: tuple[int, ...] | None = None,
    seqlens_k: tuple[int, ...] | None = None,
    return_max: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The same function as the reference; an output of another dtype is computed in that dtype."""
    lengths_q = host_lengths(cu_seqlens_q, seqlens_q, len(q_THD), "mla_prefill")
    lengths_k = host_lengths(cu_seqlens_k, seqlens_k, len(k_SHD), "mla_prefill")
    reference.check_lengths(lengths_q, lengths_k)
    dtype = out_dtype or v_SHV.dtype
    outputs = [
        _attend(q.to(dtype), k.to(dtype), v.to(dtype), scale)
        for q, k, v in zip(
            q_THD.split(lengths_q), k_SHD.split(lengths_k), v_SHV.split(lengths_k), strict=True
        )
        if len(q)
    ]
    out_THV = torch.cat(outputs) if outputs else v_SHV.new_zeros(0, *v_SHV.shape[1:], dtype=dtype)
    if not return_max:
        return out_THV
    return out_THV, largest_scores(q_THD, k_SHD, scale, lengths_q, lengths_k)


@torch.no_grad()
def largest_scores(
    q_THD: Tensor,
    k_SHD: Tensor,
    scale: float,
    lengths_q: tuple[int, ...],
    lengths_k: tuple[int, ...],
) -> Tensor:
    """Largest scaled score [H] of each head, from the scores of one head and sequence at a time."""
    dtype = math_dtype(q_THD)
    largest_H = q_THD.new_full(q_THD.shape[1:2], -math.inf, dtype=dtype)
    for q, k in zip(q_THD.split(lengths_q), k_SHD.split(lengths_k), strict=True):
        hidden = ~reference.causal_mask(len(q), len(k), q.device)
        for head in range(q.shape[1] if len(q) else 0):
            scores_TS = (q[:, head].to(dtype) @ k[:, head].to(dtype).T) * scale
            largest = scores_TS.masked_fill_(hidden, -math.inf).amax()
            largest_H[head] = torch.maximum(largest_H[head], largest)
    return largest_H


def _attend(q_THD: Tensor, k_SHD: Tensor, v_SHV: Tensor, scale: float) -> Tensor:
    is_square = len(q_THD) == len(k_SHD)
    mask = None if is_square else reference.causal_mask(len(q_THD), len(k_SHD), q_THD.device)
    num_v = v_SHV.shape[-1]
    # Torch's kernel that never stores the [T, S] scores wants values as wide as the keys.
    v_SHV = F.pad(v_SHV, (0, max(0, q_THD.shape[-1] - num_v)))
    o_HTV = F.scaled_dot_product_attention(
        q_THD.transpose(0, 1)[None],
        k_SHD.transpose(0, 1)[None],
        v_SHV.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=is_square,
        scale=scale,
    )
    return o_HTV[0].transpose(0, 1)[..., :num_v]
