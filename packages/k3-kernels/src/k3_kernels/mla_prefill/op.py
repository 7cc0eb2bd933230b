"""mla_prefill by Triton. T queries, S keys, N sequences, H heads, D head dim, V value dim."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from k3_core.custom_op import custom_op
from k3_core.ops.mla_prefill import reference
from k3_kernels.hopper import fits_descriptors, has_gluon
from k3_kernels.launch import check_floats, dot_precision, last_contiguous, needs_grad
from k3_kernels.mla_prefill import cpu, torch_cuda
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
    """As `mla_prefill.reference`; `out_dtype` float32 keeps the output unrounded (None: v's).

    Without the host copies of the lengths nothing is checked that would need a device read.
    Calls that need gradients run torch's attention.
    """
    if needs_grad(q_THD, k_SHD, v_SHV):
        core = torch_cuda if q_THD.is_cuda else cpu
        result = core.mla_prefill(
            q_THD,
            k_SHD,
            v_SHV,
            scale=scale,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            seqlens_q=seqlens_q,
            seqlens_k=seqlens_k,
            return_max=return_max,
        )
        if out_dtype is None:
            return result
        return (result[0].to(out_dtype), result[1]) if return_max else result.to(out_dtype)  # type: ignore[union-attr]
    _check(q_THD, k_SHD, v_SHV, scale, seqlens_q, seqlens_k)
    shape, device = (*q_THD.shape[:2], v_SHV.shape[-1]), q_THD.device
    out_THV = torch.empty(shape, dtype=out_dtype or v_SHV.dtype, device=device)
    if not out_THV.numel():
        max_H = torch.full(shape[1:2], -math.inf, device=device)
        return (out_THV, max_H) if return_max else out_THV
    q_THD, k_SHD, v_SHV = (last_contiguous(x) for x in (q_THD, k_SHD, v_SHV))
    run = _run
    if uses_gluon(q_THD, k_SHD, v_SHV):
        # Its module compiles only where it runs, so only this line imports it.
        from k3_kernels.mla_prefill import gluon

        run = gluon.run
    largest_H = run(
        q_THD,
        k_SHD,
        v_SHV,
        cu_seqlens_q,
        cu_seqlens_k,
        out_THV,
        scale=scale,
        return_max=return_max,
    )
    return out_THV if largest_H is None else (out_THV, largest_H)


def uses_gluon(q_THD: Tensor, k_SHD: Tensor, v_SHV: Tensor) -> bool:
    """The rule: released head dims in 16 bits, in rows that descriptors read, on a Hopper GPU."""
    return (
        q_THD.element_size() == 2
        and (q_THD.shape[-1], v_SHV.shape[-1]) == (192, 128)
        and fits_descriptors(q_THD, k_SHD, v_SHV)
        and has_gluon(q_THD.device)
    )


def _run(
    q_THD: Tensor,
    k_SHD: Tensor,
    v_SHV: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    out_THV: Tensor,
    *,
    scale: float,
    return_max: bool,
) -> Tensor | None:
    """Plain Triton, for every shape: fill `out`, return the largest scores where asked for."""
    (num_tokens, num_heads, dim), value_dim = q_THD.shape, v_SHV.shape[-1]
    tile = TILES[q_THD.element_size()]
    num_sequences = cu_seqlens_q.numel() - 1
    num_tiles = triton.cdiv(num_tokens, tile.queries) + num_sequences
    max_shape = (num_tiles if return_max else 1, num_heads)
    max_MH = torch.full(max_shape, -math.inf, dtype=torch.float32, device=q_THD.device)
    # A descriptor's row of values is at least 16 bytes.
    is_tma = tile.is_tma and fits_descriptors(k_SHD, v_SHV) and value_dim >= 8
    if is_tma:
        triton.set_allocator(_scratch)
    power, value_pad = 1 << (dim.bit_length() - 1), triton.next_power_of_2(value_dim)
    rest = max(16, triton.next_power_of_2(dim - power)) if dim > power else 0
    # Three stages of wider heads exceed the 227 KB of shared memory of a multiprocessor.
    most_stages = tile.num_stages if power + rest + value_pad <= 384 else 2
    mla_prefill_kernel[(num_heads * num_tiles,)](
        q_THD,
        k_SHD,
        v_SHV,
        cu_seqlens_q,
        cu_seqlens_k,
        out_THV,
        max_MH,
        num_sequences,
        num_tiles,
        num_heads,
        *q_THD.stride()[:2],
        *k_SHD.stride()[:2],
        *v_SHV.stride()[:2],
        scale * math.log2(math.e),
        D=dim,
        DA=power,
        DB=rest or 16,
        V=value_dim,
        VPAD=value_pad,
        NPAD=triton.next_power_of_2(num_sequences),
        HAS_MAX=return_max,
        IS_TMA=is_tma,
        BM=tile.queries,
        BN=tile.keys,
        PRECISION=dot_precision(q_THD.dtype),
        num_warps=tile.num_warps,
        num_stages=min(tile.num_stages, most_stages),
    )
    return max_MH.amax(0) if return_max else None


def _scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    """Memory for descriptors made on the device; torch aligns to 512 bytes."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


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
