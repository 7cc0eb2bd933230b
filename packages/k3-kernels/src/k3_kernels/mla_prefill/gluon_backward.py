"""Launch of the backward of mla_prefill in Gluon, on a Hopper GPU.

Its modules compile only where they run: import it only there.

Legend: T queries, S keys, P padded queries, N sequences, H heads, D head dim, V value dim.
"""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from k3_kernels.mla_prefill.backward_tiles import locate_kernel, unpad_kernel
from k3_kernels.mla_prefill.forward import Call
from k3_kernels.mla_prefill.gluon import describe
from k3_kernels.mla_prefill.gluon_backward_kernel import backward_kernel

QUERIES, KEYS, STAGES = 64, 128, 2
REGISTERS = 240
"""Of a thread of the second warpgroup; the first gets as many, the other warps 24."""


def run(
    call: Call,
    inputs: tuple[Tensor, Tensor, Tensor],
    padded: tuple[Tensor, Tensor, Tensor],
    grads: list[Tensor],
    rows: int,
) -> None:
    """Fills the gradients of q, k and v, for calls that `forward.uses_gluon` lets through.

    padded: d_out, lse and delta, in which each sequence has a multiple of `rows` queries, and
    these are a multiple of QUERIES.
    """
    q_THD, k_SHD, v_SHV = inputs
    d_out_PHV, lse_HP, delta_HP = padded
    dq_THD, dk_SHD, dv_SHV = grads
    num_heads, num_padded = lse_HP.shape
    dim, value_dim, device = q_THD.shape[-1], v_SHV.shape[-1], q_THD.device
    wide = 1 << (dim.bit_length() - 1)
    part, half = (dim - wide) // 2, KEYS // 2
    num_sequences = call.cu_seqlens_q.numel() - 1
    num_key_tiles = len(k_SHD) // KEYS + num_sequences
    dq_HPD = torch.empty(num_heads, num_padded, dim, dtype=torch.float32, device=device)
    # A ticket, padded to 16 bytes, and a count for each head and tile of queries.
    counts = torch.zeros(4 + lse_HP.numel() // QUERIES, dtype=torch.int32, device=device)
    padded_sequences = triton.next_power_of_2(num_sequences)
    table = torch.empty(num_key_tiles, 6, dtype=torch.int32, device=device)
    locate_kernel[(num_key_tiles,)](
        call.cu_seqlens_q,
        call.cu_seqlens_k,
        table,
        num_sequences,
        NPAD=padded_sequences,
        ROWS=rows,
        BN=KEYS,
        num_warps=1,
    )
    backward_kernel[(num_heads * num_key_tiles,)](
        describe(k_SHD, half, wide),
        describe(k_SHD, half, part),
        describe(v_SHV, half, value_dim),
        describe(q_THD, QUERIES, wide),
        describe(q_THD, QUERIES, part),
        describe(d_out_PHV, QUERIES, value_dim),
        _vectors(lse_HP),
        _vectors(delta_HP),
        _tiles(dq_HPD, wide // 2),
        _tiles(dq_HPD, part),
        table,
        dk_SHD,
        dv_SHV,
        counts,
        counts[4:],
        num_key_tiles,
        num_padded,
        num_heads,
        q_THD.stride(1),
        k_SHD.stride(1),
        v_SHV.stride(1),
        call.scale,
        call.scale * math.log2(math.e),
        DA=wide,
        DB=part,
        V=value_dim,
        BM=QUERIES,
        BN=KEYS,
        STAGES=STAGES,
        REGISTERS=REGISTERS,
        num_warps=4,
    )
    unpad_kernel[(num_heads * (num_padded // rows),)](
        dq_HPD,
        call.cu_seqlens_q,
        dq_THD,
        num_sequences,
        num_padded // rows,
        num_heads,
        call.scale,
        D=dim,
        DA=wide,
        DB=dim - wide,
        NPAD=padded_sequences,
        ROWS=rows,
        num_warps=8,
    )


def _vectors(x_HP: Tensor) -> TensorDescriptor:
    """Tiles of numbers of the queries."""
    layout = NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    return TensorDescriptor(x_HP, [x_HP.numel()], [1], [QUERIES], layout)


def _tiles(dq_HPD: Tensor, columns: int) -> TensorDescriptor:
    """Blocks [QUERIES, columns] of dQ in the order of registers, as rows of 256."""
    layout = NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    shape = [dq_HPD.numel() // 256, 256]
    return TensorDescriptor(dq_HPD, shape, [256, 1], [QUERIES * columns // 256, 256], layout)
