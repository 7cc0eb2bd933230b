"""mla_prefill on CUDA by torch's variable-length flash attention: one launch for all sequences."""

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn

from k3_core.ops.mla_prefill import reference
from k3_core.ops.varlen import host_lengths
from k3_kernels.mla_prefill import cpu

HALVES = torch.bfloat16, torch.float16

# torch 2.10 spelled causality `is_causal`, later releases a window without a right side.
_CAUSAL: dict[str, Any] = (
    {"window_size": (-1, 0)}
    if "window_size" in inspect.signature(varlen_attn).parameters
    else {"is_causal": True}
)


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
    """The same function as the reference, computed in bfloat16 for 16-bit inputs.

    float32 inputs and outputs of another dtype go to torch's per-sequence attention.
    """
    lengths_q = host_lengths(cu_seqlens_q, seqlens_q, len(q_THD), "mla_prefill")
    lengths_k = host_lengths(cu_seqlens_k, seqlens_k, len(k_SHD), "mla_prefill")
    reference.check_lengths(lengths_q, lengths_k)
    is_flash = q_THD.dtype in HALVES and out_dtype in (None, q_THD.dtype)
    if not is_flash or not max(lengths_q, default=0):
        return cpu.mla_prefill(
            q_THD,
            k_SHD,
            v_SHV,
            scale=scale,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            seqlens_q=lengths_q,
            seqlens_k=lengths_k,
            return_max=return_max,
            out_dtype=out_dtype,
        )
    value_dim = v_SHV.shape[-1]
    padded_v = F.pad(v_SHV, (0, q_THD.shape[-1] - value_dim))
    o_THD = varlen_attn(
        q_THD,
        k_SHD,
        padded_v,
        cu_seqlens_q.to(torch.int32),
        cu_seqlens_k.to(torch.int32),
        max(lengths_q),
        max(lengths_k),
        scale=scale,
        **_CAUSAL,
    )
    # It returns a tuple only when the log-sum-exp is asked for.
    o_THV: Tensor = o_THD[..., :value_dim]  # type: ignore[call-overload]
    if not return_max:
        return o_THV
    return o_THV, cpu.largest_scores(q_THD, k_SHD, scale, lengths_q, lengths_k)
