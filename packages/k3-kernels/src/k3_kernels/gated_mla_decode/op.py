"""gated_mla_decode by Triton: queries and new rows, attention, values: a launch each.

Legend as in the op's signature.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from k3_core.custom_op import custom_op
from k3_core.ops.gated_mla_decode.compose import check_shapes, decode_by
from k3_kernels.early import early_launch
from k3_kernels.gated_mla_decode.kernel import queries_kernel, values_kernel
from k3_kernels.hopper import fits_descriptors
from k3_kernels.launch import dot_precision
from k3_kernels.linear.op import MAX_ROWS, linear
from k3_kernels.mla_decode.op import attend_pieces, mla_decode
from k3_kernels.rms_norm.op import rms_norm

MAX_BYTES = 160 * 1024
"""Weights of a head that a program holds."""
QUERY_ROWS, VALUE_ROWS = 16, 8
"""Rows of a program, before and behind the attention."""
PIECES = 16
"""That a program reads at once."""

_composed = decode_by(rms_norm, linear, mla_decode)


@custom_op("gated_mla_decode.triton", is_differentiable=False)
@torch.no_grad()
def gated_mla_decode(
    q_BQ: Tensor,
    latent_BX: Tensor,
    gate_BHV: Tensor,
    q_norm_Q: Tensor,
    q_weight_HDQ: Tensor,
    kv_norm_C: Tensor,
    kv_weight_HEC: Tensor,
    *,
    pages_PLX: Tensor,
    page_table_BM: Tensor,
    lengths_B: Tensor,
    scale: float,
    eps: float,
) -> Tensor:
    """As `k3_core.ops.gated_mla_decode.GatedMlaDecode`.

    Few 16-bit rows of widths that are powers of two take the three launches, others the kernels of
    `rms_norm`, `linear` and `mla_decode`. A row whose length is not in its pages writes nothing.
    """
    check_shapes(q_BQ, latent_BX, gate_BHV, q_weight_HDQ, kv_weight_HEC, pages_PLX)
    weights = q_norm_Q, q_weight_HDQ, kv_norm_C, kv_weight_HEC
    if not takes_three_launches(q_BQ, latent_BX, gate_BHV, *weights, pages_PLX, page_table_BM):
        return _composed(
            *(q_BQ, latent_BX, gate_BHV, *weights),
            pages_PLX=pages_PLX,
            page_table_BM=page_table_BM,
            lengths_B=lengths_B,
            scale=scale,
            eps=eps,
        )
    lengths_B = lengths_B.contiguous()
    cache = pages_PLX, page_table_BM, lengths_B
    queries = _make_queries(q_BQ, latent_BX, *weights, gate_BHV.shape[2], *cache, eps)
    part_BHSC, lse_BHS = attend_pieces(*queries, *cache, scale)
    return _make_values(part_BHSC, lse_BHS, kv_weight_HEC, gate_BHV)


def takes_three_launches(
    q_BQ: Tensor,
    latent_BX: Tensor,
    gate_BHV: Tensor,
    q_norm_Q: Tensor,
    q_weight_HDQ: Tensor,
    kv_norm_C: Tensor,
    kv_weight_HEC: Tensor,
    pages_PLX: Tensor,
    page_table_BM: Tensor,
) -> bool:
    """The rule: 16 bits, few rows, widths that are powers of two, weights of a head that fit."""
    matrices = q_weight_HDQ.flatten(0, 1), kv_weight_HEC.flatten(0, 1)
    tensors = (q_BQ, latent_BX, gate_BHV, *matrices)
    num_v, num_c = gate_BHV.shape[2], kv_weight_HEC.shape[2]
    num_n, num_r = kv_weight_HEC.shape[1] - num_v, latent_BX.shape[1] - num_c
    padded = triton.next_power_of_2(q_weight_HDQ.shape[2])
    num_weights = max(num_n * (padded + num_c), num_r * padded, num_v * num_c)
    return (
        0 < len(q_BQ) <= MAX_ROWS
        and q_BQ.element_size() == 2
        and all(t.dtype == q_BQ.dtype for t in (*tensors, q_norm_Q, kv_norm_C))
        and all(t.stride(-1) == 1 for t in (*tensors, pages_PLX, page_table_BM))
        and gate_BHV.stride(1) == num_v
        and all(n >= 16 and n & (n - 1) == 0 for n in (num_n, num_r, num_v, num_c))
        and 2 * num_weights <= MAX_BYTES
        and fits_descriptors(*matrices)
    )


def _make_queries(
    q_BQ: Tensor,
    latent_BX: Tensor,
    q_norm_Q: Tensor,
    q_weight_HDQ: Tensor,
    kv_norm_C: Tensor,
    kv_weight_HEC: Tensor,
    num_v: int,
    pages_PLX: Tensor,
    page_table_BM: Tensor,
    lengths_B: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Absorbed queries [B, H, C] and the rest of them [B, H, R]; fills the rows' last places."""
    (num_heads, num_d, rank), num_c = q_weight_HDQ.shape, kv_weight_HEC.shape[2]
    num_rows, num_r = len(q_BQ), latent_BX.shape[1] - num_c
    q_latent_BHC = q_BQ.new_empty(num_rows, num_heads, num_c)
    q_shared_BHR = q_BQ.new_empty(num_rows, num_heads, num_r)
    padded = max(16, triton.next_power_of_2(rank))
    queries_kernel[(triton.cdiv(num_rows, QUERY_ROWS) * (2 * num_heads + 1),)](
        q_BQ,
        latent_BX,
        _describe(q_weight_HDQ, num_d - num_r, padded),
        _describe(q_weight_HDQ, num_r, padded),
        _describe(kv_weight_HEC, num_d - num_r, num_c),
        q_norm_Q,
        kv_norm_C,
        q_latent_BHC,
        q_shared_BHR,
        pages_PLX,
        page_table_BM,
        lengths_B,
        num_rows,
        q_BQ.stride(0),
        latent_BX.stride(0),
        *pages_PLX.stride()[:2],
        page_table_BM.stride(0),
        page_table_BM.shape[1] * pages_PLX.shape[1],
        eps,
        H=num_heads,
        Q=rank,
        QPAD=padded,
        N=num_d - num_r,
        R=num_r,
        V=num_v,
        C=num_c,
        L=pages_PLX.shape[1],
        BM=QUERY_ROWS,
        PRECISION=dot_precision(q_BQ.dtype),
        **early_launch(num_rows, q_BQ.device),
        num_warps=4,
    )
    return q_latent_BHC, q_shared_BHR


def _make_values(
    part_BHSC: Tensor, lse_BHS: Tensor, kv_weight_HEC: Tensor, gate_BHV: Tensor
) -> Tensor:
    """y [B, H, V] of the pieces of an attention."""
    (num_rows, num_heads, num_v), (_, _, splits, num_c) = gate_BHV.shape, part_BHSC.shape
    y_BHV = gate_BHV.new_empty(gate_BHV.shape)
    padded = triton.next_power_of_2(splits)
    values_kernel[(triton.cdiv(num_rows, VALUE_ROWS) * num_heads,)](
        part_BHSC,
        lse_BHS,
        _describe(kv_weight_HEC, num_v, num_c),
        gate_BHV,
        y_BHV,
        num_rows,
        splits,
        gate_BHV.stride(0),
        H=num_heads,
        N=kv_weight_HEC.shape[1] - num_v,
        V=num_v,
        C=num_c,
        SPAD=padded,
        BS=min(PIECES, padded),
        BM=VALUE_ROWS,
        PRECISION=dot_precision(gate_BHV.dtype),
        **early_launch(num_rows, gate_BHV.device),
        num_warps=8,
    )
    return y_BHV


def _describe(weight: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Blocks of a weight [heads, rows of a head, inputs] as a matrix."""
    flat = weight.flatten(0, 1)
    return TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [rows, columns])
