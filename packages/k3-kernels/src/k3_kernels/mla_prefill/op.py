"""mla_prefill by Triton. T queries, S keys, N sequences, H heads, D head dim, V value dim."""

from __future__ import annotations

import torch
from torch import Tensor

from k3_core.custom_op import custom_op
from k3_core.ops.mla_prefill import reference
from k3_kernels.launch import check_floats, needs_grad
from k3_kernels.mla_prefill.backward import run_with_gradients
from k3_kernels.mla_prefill.forward import Call, run_forward


@custom_op("mla_prefill.triton")
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
    """As `mla_prefill.reference`; with `out_dtype` float32 the output was never rounded.

    Without the host copies of the lengths nothing is checked that would need a device read.
    The backward takes the unrounded output, which a call with gradients keeps.
    """
    _check(q_THD, k_SHD, v_SHV, scale, seqlens_q, seqlens_k)
    call = Call(cu_seqlens_q, cu_seqlens_k, scale, return_max, out_dtype or v_SHV.dtype)
    if needs_grad(q_THD, k_SHD, v_SHV):
        out_THV, largest_H = run_with_gradients(call, q_THD, k_SHD, v_SHV)
    else:
        shape = (*q_THD.shape[:2], v_SHV.shape[-1])
        out_THV = torch.empty(shape, dtype=call.out_dtype, device=q_THD.device)
        largest_H = run_forward(call, q_THD, k_SHD, v_SHV, out_THV)
    return out_THV if largest_H is None else (out_THV, largest_H)


def _check(
    q_THD: Tensor,
    k_SHD: Tensor,
    v_SHV: Tensor,
    scale: float,
    lengths_q: tuple[int, ...] | None,
    lengths_k: tuple[int, ...] | None,
) -> None:
    check_floats("mla_prefill", q=q_THD, k=k_SHD, v=v_SHV)
    same_heads = q_THD.shape[1] == k_SHD.shape[1] == v_SHV.shape[1]
    if not same_heads or q_THD.shape[2] != k_SHD.shape[2] or len(k_SHD) != len(v_SHV):
        raise ValueError(
            f"mla_prefill: q {tuple(q_THD.shape)}, k {tuple(k_SHD.shape)} and v "
            f"{tuple(v_SHV.shape)} do not fit; they are [T, H, D], [S, H, D] and [S, H, V]"
        )
    if not q_THD.dtype == k_SHD.dtype == v_SHV.dtype:
        raise TypeError(
            f"mla_prefill: q, k, v are {q_THD.dtype}, {k_SHD.dtype}, {v_SHV.dtype}; use one dtype"
        )
    if scale <= 0:
        raise ValueError(f"mla_prefill: scale {scale} is not positive; use mla_prefill.reference")
    if q_THD.shape[2] < 16:
        raise ValueError(
            f"mla_prefill: head dim {q_THD.shape[2]} is below 16, the least that a product takes; "
            "choose mla_prefill.reference"
        )
    if lengths_q is not None and lengths_k is not None:
        reference.check_lengths(lengths_q, lengths_k)
