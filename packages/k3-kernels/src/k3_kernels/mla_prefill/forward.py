"""The forward of mla_prefill on Triton: which kernel runs, and its launch.

Legend: T queries, S keys, N sequences, H heads, D head dim, V value dim.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from k3_kernels.hopper import fits_descriptors, has_gluon
from k3_kernels.launch import dot_precision, last_contiguous
from k3_kernels.mla_prefill.kernel import mla_prefill_kernel


class Tile(NamedTuple):
    """Queries and keys of a step, warps, pipeline stages; keys and values by tensor descriptors."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int
    is_tma: bool = False


TILES = {2: Tile(128, 64, 8, 3, is_tma=True), 4: Tile(32, 32, 4, 1)}
"""By the bytes of a value."""


class Call(NamedTuple):
    """What a call is made of beside queries, keys and values."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    scale: float
    return_max: bool
    out_dtype: torch.dtype


def run_forward(
    call: Call,
    q_THD: Tensor,
    k_SHD: Tensor,
    v_SHV: Tensor,
    out_THV: Tensor,
    lse_HT: Tensor | None = None,
) -> Tensor | None:
    """Fills `out`; returns the largest scaled scores [H] where they are asked for.

    lse: filled with log2 of the sum of exponentials of each query's scaled scores.
    """
    if not out_THV.numel():
        num_heads = out_THV.shape[1]
        return torch.full((num_heads,), -math.inf, device=q_THD.device) if call.return_max else None
    inputs = last_contiguous(q_THD), last_contiguous(k_SHD), last_contiguous(v_SHV)
    if uses_gluon(*inputs):
        # Its module compiles only where it runs, so only this line imports it.
        from k3_kernels.mla_prefill import gluon

        return gluon.run(call, *inputs, out_THV, lse_HT)
    return _run(call, *inputs, out_THV, lse_HT)


def uses_gluon(q_THD: Tensor, k_SHD: Tensor, v_SHV: Tensor) -> bool:
    """The rule: released head dims in 16 bits, in rows that descriptors read, on a Hopper GPU."""
    return (
        q_THD.element_size() == 2
        and (q_THD.shape[-1], v_SHV.shape[-1]) == (192, 128)
        and fits_descriptors(q_THD, k_SHD, v_SHV)
        and has_gluon(q_THD.device)
    )


def split_dim(dim: int) -> tuple[int, int]:
    """Head dim as the largest power of two in it and a padded rest, 0 for none."""
    power = 1 << (dim.bit_length() - 1)
    return power, max(16, triton.next_power_of_2(dim - power)) if dim > power else 0


def _run(
    call: Call,
    q_THD: Tensor,
    k_SHD: Tensor,
    v_SHV: Tensor,
    out_THV: Tensor,
    lse_HT: Tensor | None,
) -> Tensor | None:
    """Plain Triton, for every shape."""
    (num_tokens, num_heads, dim), value_dim = q_THD.shape, v_SHV.shape[-1]
    tile = TILES[q_THD.element_size()]
    num_sequences = call.cu_seqlens_q.numel() - 1
    num_tiles = triton.cdiv(num_tokens, tile.queries) + num_sequences
    max_shape = (num_tiles if call.return_max else 1, num_heads)
    max_MH = torch.full(max_shape, -math.inf, dtype=torch.float32, device=q_THD.device)
    # A descriptor's row of values is at least 16 bytes.
    is_tma = tile.is_tma and fits_descriptors(k_SHD, v_SHV) and value_dim >= 8
    if is_tma:
        triton.set_allocator(_scratch)
    power, rest = split_dim(dim)
    value_pad = triton.next_power_of_2(value_dim)
    # Three stages of wider heads exceed the 227 KB of shared memory of a multiprocessor.
    most_stages = tile.num_stages if power + rest + value_pad <= 384 else 2
    mla_prefill_kernel[(num_heads * num_tiles,)](
        q_THD,
        k_SHD,
        v_SHV,
        call.cu_seqlens_q,
        call.cu_seqlens_k,
        out_THV,
        max_MH,
        max_MH if lse_HT is None else lse_HT,
        num_sequences,
        num_tiles,
        num_heads,
        num_tokens,
        *q_THD.stride()[:2],
        *k_SHD.stride()[:2],
        *v_SHV.stride()[:2],
        call.scale * math.log2(math.e),
        D=dim,
        DA=power,
        DB=rest or 16,
        V=value_dim,
        VPAD=value_pad,
        NPAD=triton.next_power_of_2(num_sequences),
        HAS_MAX=call.return_max,
        HAS_LSE=lse_HT is not None,
        IS_TMA=is_tma,
        BM=tile.queries,
        BN=tile.keys,
        PRECISION=dot_precision(q_THD.dtype),
        num_warps=tile.num_warps,
        num_stages=min(tile.num_stages, most_stages),
    )
    return max_MH.amax(0) if call.return_max else None


def _scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    """Memory for descriptors made on the device; torch aligns to 512 bytes."""
    return torch.empty(size, dtype=torch.int8, device="cuda")
