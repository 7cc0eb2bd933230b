"""mla_prefill of a Hopper GPU in Gluon: 128 queries a program, softmax beside the products.

Two warpgroups take 64 queries each and a warp loads what both read. A warpgroup starts the scores
of a tile of keys together with the values of the tile before, so that the tensor cores work while
it makes the softmax; plain Triton does these one after the other. At T = 8192, H = 96 that is
684 instead of 470 TFLOP/s (H200, 2026-11-30). Not interpretable: import it only where it runs.

Legend: T queries, S keys, N sequences, H heads, D = DA + DB head dim, V value dim.
"""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from k3_kernels.mla_prefill.forward import Call

QUERIES, KEYS, STAGES = 128, 128, 2
REGISTERS = 240
"""Of a thread of the second warpgroup; the first gets as many, the loading warp 24."""


@gluon.jit
def load_tiles(
    q_a, q_b, k_a, k_b, values, q_full, k_full, k_empty, v_full, v_empty,
    q_a_desc, q_b_desc, k_a_desc, k_b_desc, v_desc,
    q_row, k_row, q_column, k_column, v_column, num_blocks,
    D: gl.constexpr, DA: gl.constexpr, V: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The queries once, then each tile of keys and of values as soon as its buffer is free."""
    HALF: gl.constexpr = BM // 2
    for half in gl.static_range(2):
        full = q_full.index(half)
        row = q_row + half * HALF
        mbarrier.expect(full, HALF * D * 2)
        tma.async_copy_global_to_shared(q_a_desc, [row, q_column], full, q_a.index(half))
        tma.async_copy_global_to_shared(q_b_desc, [row, q_column + DA], full, q_b.index(half))
    for j in range(num_blocks):
        stage = j % STAGES
        phase = (j // STAGES) & 1
        row = k_row + j * BN
        full = k_full.index(stage)
        mbarrier.wait(k_empty.index(stage), phase ^ 1)
        mbarrier.expect(full, BN * D * 2)
        tma.async_copy_global_to_shared(k_a_desc, [row, k_column], full, k_a.index(stage))
        tma.async_copy_global_to_shared(k_b_desc, [row, k_column + DA], full, k_b.index(stage))
        full = v_full.index(stage)
        mbarrier.wait(v_empty.index(stage), phase ^ 1)
        mbarrier.expect(full, BN * V * 2)
        tma.async_copy_global_to_shared(v_desc, [row, v_column], full, values.index(stage))


@gluon.jit
def start_scores(q_a, q_b, k_a, k_b, zeros):
    """Products of the queries with a tile of keys, under way."""
    scores = warpgroup_mma(q_a, k_a.permute((1, 0)), zeros, use_acc=False, is_async=True)
    return warpgroup_mma(q_b, k_b.permute((1, 0)), scores, is_async=True)


@gluon.jit
def step(
    j, acc, top, total, weights, q_a, q_b, k_a, k_b, values, k_full, k_empty, v_full, v_empty,
    last_key, scale, zeros,
    BN: gl.constexpr, STAGES: gl.constexpr, IS_MASKED: gl.constexpr,
    SCORES: gl.constexpr, OPERAND: gl.constexpr,
):  # fmt: skip
    """Scores of tile j beside the values of tile j - 1, then softmax of j beside the latter."""
    stage = j % STAGES
    before = (j - 1) % STAGES
    mbarrier.wait(k_full.index(stage), (j // STAGES) & 1)
    pending_scores = start_scores(q_a, q_b, k_a.index(stage), k_b.index(stage), zeros)
    mbarrier.wait(v_full.index(before), ((j - 1) // STAGES) & 1)
    pending_acc = warpgroup_mma(weights, values.index(before), acc, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[pending_scores])
    mbarrier.arrive(k_empty.index(stage))
    if IS_MASKED:
        key = j * BN + gl.arange(0, BN, layout=gl.SliceLayout(0, SCORES))
        scores = gl.where(key[None, :] <= last_key[:, None], scores, -float("inf"))
    # The scale is positive, so it commutes with the maximum and joins the subtraction.
    new_top = gl.maximum(top, gl.max(scores, axis=1) * scale)
    new_weights = gl.exp2(scores * scale - new_top[:, None])
    old = gl.exp2(top - new_top)
    total = total * old + gl.sum(new_weights, axis=1)
    acc = warpgroup_mma_wait(0, deps=[pending_acc])
    mbarrier.arrive(v_empty.index(before))
    acc = acc * gl.convert_layout(old, gl.SliceLayout(1, acc.type.layout))[:, None]
    return acc, new_top, total, gl.convert_layout(new_weights.to(weights.dtype), OPERAND)


@gluon.jit
def attend(
    HALF_ID: gl.constexpr, q_a, q_b, k_a, k_b, values, q_full, k_full, k_empty, v_full, v_empty,
    out_ptr, max_ptr, lse_ptr, q_row, first_query, num_queries, offset, num_keys, head, num_heads,
    full, num_blocks, scale,
    V: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    HAS_MAX: gl.constexpr, HAS_LSE: gl.constexpr,
):  # fmt: skip
    """One warpgroup: half of the queries, all of their keys; `full` tiles need no mask."""
    HALF: gl.constexpr = BM // 2
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    q_a = q_a.index(HALF_ID)
    q_b = q_b.index(HALF_ID)
    row = HALF_ID * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, SCORES))
    last_key = offset + first_query + row
    zeros = gl.zeros((HALF, BN), gl.float32, SCORES)
    mbarrier.wait(q_full.index(HALF_ID), 0)
    mbarrier.wait(k_full.index(0), 0)
    pending = start_scores(q_a, q_b, k_a.index(0), k_b.index(0), zeros)
    scores = warpgroup_mma_wait(0, deps=[pending])
    mbarrier.arrive(k_empty.index(0))
    key = gl.arange(0, BN, layout=gl.SliceLayout(0, SCORES))
    scores = gl.where(key[None, :] <= last_key[:, None], scores, -float("inf"))
    top = gl.max(scores, axis=1) * scale
    weights = gl.exp2(scores * scale - top[:, None])
    total = gl.sum(weights, axis=1)
    weights = gl.convert_layout(weights.to(values.dtype), OPERAND)
    acc = gl.zeros((HALF, V), gl.float32, OUT)
    for j in range(1, full):
        acc, top, total, weights = step(
            j, acc, top, total, weights, q_a, q_b, k_a, k_b, values, k_full, k_empty, v_full,
            v_empty, last_key, scale, zeros, BN, STAGES, False, SCORES, OPERAND,
        )  # fmt: skip
    for j in range(gl.maximum(full, 1), num_blocks):
        acc, top, total, weights = step(
            j, acc, top, total, weights, q_a, q_b, k_a, k_b, values, k_full, k_empty, v_full,
            v_empty, last_key, scale, zeros, BN, STAGES, True, SCORES, OPERAND,
        )  # fmt: skip
    last = num_blocks - 1
    mbarrier.wait(v_full.index(last % STAGES), (last // STAGES) & 1)
    tile = values.index(last % STAGES)
    if num_blocks * BN > num_keys:
        # The tile goes on into the next sequence, and 0 * NaN is NaN. Both halves write the same.
        ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
        place = last * BN + gl.arange(0, BN, layout=gl.SliceLayout(1, ROWS))
        tile.store(gl.where((place < num_keys)[:, None], tile.load(ROWS), 0.0))
        fence_async_shared()
    pending = warpgroup_mma(weights, tile, acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[pending])
    if HAS_LSE:
        gl.store(lse_ptr + row, top + gl.log2(total), mask=first_query + row < num_queries)
    if HAS_MAX:
        largest = gl.max(gl.where(first_query + row < num_queries, top, -float("inf")), axis=0)
        gl.store(max_ptr + HALF_ID * num_heads, largest * 0.6931471805599453)
    row = HALF_ID * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, OUT))
    value = gl.arange(0, V, layout=gl.SliceLayout(0, OUT))
    inverse = gl.convert_layout(1.0 / total, gl.SliceLayout(1, OUT))
    at = out_ptr + ((q_row + row).to(gl.int64) * num_heads + head)[:, None] * V + value[None, :]
    out = (acc * inverse[:, None]).to(out_ptr.dtype.element_ty)
    gl.store(at, out, mask=(first_query + row < num_queries)[:, None])


@gluon.jit
def add(a, b):
    """For the running sum."""
    return a + b


@gluon.jit
def mla_prefill_kernel(
    q_a_desc, q_b_desc, k_a_desc, k_b_desc, v_desc, cu_q_ptr, cu_k_ptr, out_ptr, max_ptr,
    lse_ptr, num_sequences, num_tiles, num_heads, num_tokens, q_stride_h, k_stride_h, v_stride_h,
    scale,
    D: gl.constexpr, DA: gl.constexpr, V: gl.constexpr, NPAD: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
    HAS_MAX: gl.constexpr, HAS_LSE: gl.constexpr,
):  # fmt: skip
    """Grid: heads x tiles of queries, late ones first; `scale` (positive) holds log2(e)."""
    pid = gl.program_id(0)
    head = pid // num_tiles
    tile = num_tiles - 1 - pid % num_tiles
    # Which sequence the tile is in: a running sum over all of them, as in plain Triton.
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    n = gl.arange(0, NPAD, layout=FLAT)
    is_in = n < num_sequences
    begins = gl.load(cu_q_ptr + n, mask=is_in, other=0).to(gl.int32)
    lengths = gl.load(cu_q_ptr + n + 1, mask=is_in, other=0).to(gl.int32) - begins
    ends = gl.associative_scan((lengths + BM - 1) // BM, 0, add)
    sequence = gl.sum((is_in & (ends <= tile)).to(gl.int32), axis=0)
    if sequence >= num_sequences:
        return
    tiles_before = gl.max(gl.where(n < sequence, ends, 0), axis=0)
    q_first = gl.load(cu_q_ptr + sequence).to(gl.int32)
    num_queries = gl.load(cu_q_ptr + sequence + 1).to(gl.int32) - q_first
    k_first = gl.load(cu_k_ptr + sequence).to(gl.int32)
    num_keys = gl.load(cu_k_ptr + sequence + 1).to(gl.int32) - k_first
    first_query = (tile - tiles_before) * BM
    offset = num_keys - num_queries
    full = (offset + first_query + 1) // BN
    num_blocks = gl.cdiv(gl.minimum(num_keys, offset + first_query + BM), BN)
    dtype: gl.constexpr = v_desc.dtype
    HALF: gl.constexpr = BM // 2
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_a = gl.allocate_shared_memory(dtype, [2, HALF, DA], q_a_desc.layout)
    q_b = gl.allocate_shared_memory(dtype, [2, HALF, D - DA], q_b_desc.layout)
    k_a = gl.allocate_shared_memory(dtype, [STAGES, BN, DA], k_a_desc.layout)
    k_b = gl.allocate_shared_memory(dtype, [STAGES, BN, D - DA], k_b_desc.layout)
    values = gl.allocate_shared_memory(dtype, [STAGES, BN, V], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    fence_async_shared()
    q_row = q_first + first_query
    max_at = max_ptr + tile.to(gl.int64) * (2 * num_heads) + head
    lse_at = lse_ptr + head.to(gl.int64) * num_tokens + q_row
    gl.warp_specialize(
        [
            (attend, (
                0, q_a, q_b, k_a, k_b, values, q_full, k_full, k_empty, v_full, v_empty,
                out_ptr, max_at, lse_at, q_row, first_query, num_queries, offset, num_keys, head,
                num_heads, full, num_blocks, scale, V, BM, BN, STAGES, HAS_MAX, HAS_LSE,
            )),
            (attend, (
                1, q_a, q_b, k_a, k_b, values, q_full, k_full, k_empty, v_full, v_empty,
                out_ptr, max_at, lse_at, q_row, first_query, num_queries, offset, num_keys, head,
                num_heads, full, num_blocks, scale, V, BM, BN, STAGES, HAS_MAX, HAS_LSE,
            )),
            (load_tiles, (
                q_a, q_b, k_a, k_b, values, q_full, k_full, k_empty, v_full, v_empty,
                q_a_desc, q_b_desc, k_a_desc, k_b_desc, v_desc, q_row, k_first,
                head * q_stride_h, head * k_stride_h, head * v_stride_h, num_blocks,
                D, DA, V, BM, BN, STAGES,
            )),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip


def run(
    call: Call,
    q_THD: Tensor,
    k_SHD: Tensor,
    v_SHV: Tensor,
    out_THV: Tensor,
    lse_HT: Tensor | None,
) -> Tensor | None:
    """As `forward.run_forward`, for the calls that `forward.uses_gluon` lets through."""
    num_tokens, num_heads, dim = q_THD.shape
    wide, value_dim = 1 << (dim.bit_length() - 1), v_SHV.shape[-1]
    num_sequences = call.cu_seqlens_q.numel() - 1
    num_tiles = triton.cdiv(num_tokens, QUERIES) + num_sequences
    # A row for each warpgroup of each tile; tiles that no sequence needs write nothing.
    max_MH = torch.full(
        (2 * num_tiles if call.return_max else 1, num_heads), -math.inf, device=q_THD.device
    )
    mla_prefill_kernel[(num_heads * num_tiles,)](
        describe(q_THD, QUERIES // 2, wide),
        describe(q_THD, QUERIES // 2, dim - wide),
        describe(k_SHD, KEYS, wide),
        describe(k_SHD, KEYS, dim - wide),
        describe(v_SHV, KEYS, value_dim),
        call.cu_seqlens_q,
        call.cu_seqlens_k,
        out_THV,
        max_MH,
        max_MH if lse_HT is None else lse_HT,
        num_sequences,
        num_tiles,
        num_heads,
        num_tokens,
        q_THD.stride(1),
        k_SHD.stride(1),
        v_SHV.stride(1),
        call.scale * math.log2(math.e),
        D=dim,
        DA=wide,
        V=value_dim,
        NPAD=triton.next_power_of_2(num_sequences),
        BM=QUERIES,
        BN=KEYS,
        STAGES=STAGES,
        REGISTERS=REGISTERS,
        HAS_MAX=call.return_max,
        HAS_LSE=lse_HT is not None,
        num_warps=4,
    )
    return max_MH.amax(0) if call.return_max else None


def describe(x_THD: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """The heads of a token side by side: one row, in which a head begins at its stride."""
    width = (x_THD.shape[1] - 1) * x_THD.stride(1) + x_THD.shape[2]
    layout = gl.NVMMASharedLayout(
        swizzle_byte_width=min(128, 2 * columns), element_bitwidth=16, rank=2
    )
    return TensorDescriptor(
        x_THD, [len(x_THD), width], [x_THD.stride(0), 1], [rows, columns], layout
    )
