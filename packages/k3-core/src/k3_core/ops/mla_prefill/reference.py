"""Reference of mla_prefill. T query tokens, S key tokens, H heads, D head dim, V value dim."""

import torch
from torch import Tensor

from k3_core.custom_op import custom_op
from k3_core.ops.math import math_dtype
from k3_core.ops.varlen import host_lengths


@custom_op("mla_prefill.reference")
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
    """Causal attention per sequence; the queries of a sequence are its last tokens.

    `cu_seqlens_*` are int [N+1] offsets into T and S, `seqlens_*` host copies of the lengths.
    A sequence's keys are at least as many as its queries. Softmax in float32. Returns
    o [T, H, V] in `out_dtype` (None: that of `v`; float32 is unrounded, report 2) and, with
    `return_max`, max_H: the largest scaled score of each head over the whole call (what QK-Clip
    needs, report 5).
    """
    lengths_q = host_lengths(cu_seqlens_q, seqlens_q, len(q_THD), "mla_prefill")
    lengths_k = host_lengths(cu_seqlens_k, seqlens_k, len(k_SHD), "mla_prefill")
    check_lengths(lengths_q, lengths_k)
    dtype = math_dtype(q_THD)
    outputs, maxima = [], []
    for q, k, v in zip(
        q_THD.split(lengths_q), k_SHD.split(lengths_k), v_SHV.split(lengths_k), strict=True
    ):
        scores_HTS = torch.einsum("thd,shd->hts", q.to(dtype), k.to(dtype)) * scale
        scores_HTS = scores_HTS.masked_fill(~causal_mask(len(q), len(k), q.device), float("-inf"))
        if len(q):
            maxima.append(scores_HTS.amax((1, 2)))
        outputs.append(torch.einsum("hts,shv->thv", scores_HTS.softmax(-1), v.to(dtype)))
    o_THV = torch.cat(outputs).to(out_dtype or v_SHV.dtype)
    if not return_max:
        return o_THV
    return o_THV, torch.stack(maxima).amax(0).detach()


def causal_mask(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """Boolean [T, S], true where query i may read key j: j <= S - T + i."""
    ones = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    return ones.tril(num_keys - num_queries)


def check_lengths(lengths_q: tuple[int, ...], lengths_k: tuple[int, ...]) -> None:
    """Raise ValueError unless each sequence has at least as many keys as queries."""
    if len(lengths_q) != len(lengths_k) or any(
        k < q for q, k in zip(lengths_q, lengths_k, strict=True)
    ):
        raise ValueError(
            f"mla_prefill: query lengths {lengths_q} and key lengths {lengths_k} do not fit; "
            "each sequence needs at least as many keys as queries"
        )
