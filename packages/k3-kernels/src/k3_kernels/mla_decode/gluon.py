"""mla_decode of a Hopper GPU in Gluon: scores, two halves of the values and loads side by side.

A program makes one piece of a sequence for 64 heads. One warpgroup computes scores and softmax
of a tile of 64 tokens, two gather half of the latent each, and a warp loads tiles, each of which
serves as keys and as values. Plain Triton does these in turn and takes 2.1 times as long (B = 64,
32K tokens, H200, 2026-11-30). Not interpretable: import it only where it runs.

Legend: B sequences, H heads, C latent, R shared key, L tokens a page.
"""

from __future__ import annotations

import math

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

HEADS, TOKENS, STAGES = 64, 64, 2
SLACK = 8.0
"""Weights are at most 2^8: the reference of a head moves when its scores have grown by more."""
GATHER_REGISTERS, WEIGH_REGISTERS = 192, 104
_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@gluon.jit
def load_tiles(
    k_a, k_b, k_r, k_full, k_empty, half_desc, rope_desc, table_ptr, first_tile, num_tiles,
    page_rows,
    L: gl.constexpr, C: gl.constexpr, R: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Each tile of cached tokens, which lies in one page, as soon as its buffer is free."""
    for j in range(num_tiles):
        stage = j % STAGES
        token = (first_tile + j) * BN
        row = gl.load(table_ptr + token // L).to(gl.int32) * page_rows + token % L
        mbarrier.wait(k_empty.index(stage), ((j // STAGES) & 1) ^ 1)
        full = k_full.index(stage)
        mbarrier.expect(full, BN * (C + R) * 2)
        tma.async_copy_global_to_shared(half_desc, [row, 0], full, k_a.index(stage))
        tma.async_copy_global_to_shared(half_desc, [row, C // 2], full, k_b.index(stage))
        tma.async_copy_global_to_shared(rope_desc, [row, C], full, k_r.index(stage))


@gluon.jit
def load_query(
    ptr, num_heads, stride_h, BH: gl.constexpr, WIDTH: gl.constexpr, LAYOUT: gl.constexpr
):
    """Queries of BH heads from `ptr` on, zero past the last head."""
    h = gl.arange(0, BH, layout=gl.SliceLayout(1, LAYOUT))
    c = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))
    at = ptr + h.to(gl.int64)[:, None] * stride_h + c[None, :]
    return gl.load(at, mask=(h < num_heads)[:, None], other=0.0)


@gluon.jit
def weigh(
    q_a, q_b, k_a, k_b, k_r, p_s, old_s, inverse_s, k_full, p_full, done, lse_ptr, row,
    own_heads, num_tokens, num_tiles, scale, splits,
    BH: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, SLACK: gl.constexpr,
):  # fmt: skip
    """Scores and weights of each tile, and by what earlier sums shrink."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    top = gl.full((BH,), -float("inf"), gl.float32, ROWS)
    total = gl.zeros((BH,), gl.float32, ROWS)
    zeros = gl.zeros((BH, BN), gl.float32, LAYOUT)
    token = gl.arange(0, BN, layout=gl.SliceLayout(0, LAYOUT))
    # The queries of the shared key wait where the first weights will be.
    q_r = p_s.index(0).load(gl.DotOperandLayout(0, LAYOUT, 2))
    for j in range(num_tiles):
        stage = j % STAGES
        mbarrier.wait(k_full.index(stage), (j // STAGES) & 1)
        pending = warpgroup_mma(
            q_a, k_a.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True
        )
        pending = warpgroup_mma(q_b, k_b.index(stage).permute((1, 0)), pending, is_async=True)
        pending = warpgroup_mma(q_r, k_r.index(stage).permute((1, 0)), pending, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[pending])
        scores = gl.where((token < num_tokens - j * BN)[None, :], scores, -float("inf"))
        highest = gl.max(scores, axis=1) * scale
        new_top = gl.where(highest > top + SLACK, highest, top)
        weights = gl.exp2(scores * scale - new_top[:, None])
        old = gl.exp2(top - new_top)
        total = total * old + gl.sum(weights, axis=1)
        top = new_top
        old_s.index(stage).store(old)
        p_s.index(stage).store(weights.to(p_s.dtype))
        fence_async_shared()
        mbarrier.arrive(p_full.index(stage))
    inverse_s.store(1.0 / total)
    mbarrier.arrive(done)
    h = gl.arange(0, BH, layout=ROWS)
    gl.store(lse_ptr + row + h * splits, top + gl.log2(total), mask=h < own_heads)


@gluon.jit
def gather(
    p_s, v_s, old_s, inverse_s, k_full, k_empty, p_full, done, part_ptr, row,
    own_heads, num_tokens, num_tiles, splits,
    COLUMN: gl.constexpr, C: gl.constexpr, BH: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Sum of weights times values for half of the latent, from COLUMN on."""
    HALF: gl.constexpr = C // 2
    # One product of all 256 columns needs more registers than the assembler allows.
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF // 2, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    EACH: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([BH // 32, 1], [32, 1], [1, 4], [0, 1]))
    acc = gl.zeros((BH, HALF), gl.float32, LAYOUT)
    for j in range(num_tiles):
        stage = j % STAGES
        phase = (j // STAGES) & 1
        mbarrier.wait(k_full.index(stage), phase)
        mbarrier.wait(p_full.index(stage), phase)
        if gl.min(old_s.index(stage).load(EACH), axis=0) < 1.0:
            acc = acc * old_s.index(stage).load(ROWS)[:, None]
        values = v_s.index(stage)
        if num_tokens - j * BN < BN:
            # What lies past the length is not zero, and 0 * NaN is NaN.
            TILE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
            token = gl.arange(0, BN, layout=gl.SliceLayout(1, TILE))
            is_token = (token < num_tokens - j * BN)[:, None]
            for part in gl.static_range(HALF // 64):
                columns = values.slice(part * 64, 64, dim=1)
                columns.store(gl.where(is_token, columns.load(TILE), 0.0))
            fence_async_shared()
        pending = warpgroup_mma(p_s.index(stage), values, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[pending])
        mbarrier.arrive(k_empty.index(stage))
    mbarrier.wait(done, 0)
    inverse = inverse_s.load(ROWS)
    h = gl.arange(0, BH, layout=ROWS)
    c = COLUMN + gl.arange(0, HALF, layout=gl.SliceLayout(0, LAYOUT))
    at = part_ptr + (row + h.to(gl.int64) * splits)[:, None] * C + c[None, :]
    gl.store(at, acc * inverse[:, None], mask=(h < own_heads)[:, None])


@gluon.jit
def mla_decode_kernel(
    half_desc, rope_desc, q_latent_ptr, q_rope_ptr, table_ptr, lengths_ptr, part_ptr, lse_ptr,
    num_heads, q_latent_stride_b, q_latent_stride_h, q_rope_stride_b, q_rope_stride_h,
    page_rows, table_stride, max_length, scale, splits,
    L: gl.constexpr, C: gl.constexpr, R: gl.constexpr, BH: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr, SLACK: gl.constexpr,
    GATHER_REGISTERS: gl.constexpr, WEIGH_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Grid: sequences x pieces x blocks of heads; neighbours share the pages of a piece."""
    dtype: gl.constexpr = half_desc.dtype
    num_blocks = gl.cdiv(num_heads, BH)
    pid = gl.program_id(0)
    first_head = (pid % num_blocks) * BH
    split = pid // num_blocks % splits
    b = (pid // num_blocks // splits).to(gl.int64)
    # A row cannot hold more than its pages, whatever its length says.
    length = gl.minimum(gl.load(lengths_ptr + b).to(gl.int32), max_length)
    tiles = gl.cdiv(length, BN)
    piece = gl.cdiv(tiles, splits)
    first_tile = split * piece
    num_tiles = gl.minimum(piece, tiles - first_tile)
    row = (b * num_heads + first_head) * splits + split
    own_heads = gl.minimum(num_heads - first_head, BH)
    if num_tiles <= 0:
        FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        h = gl.arange(0, BH, layout=FLAT)
        nothing = gl.full((BH,), -float("inf"), gl.float32, FLAT)
        gl.store(lse_ptr + row + h * splits, nothing, mask=h < own_heads)
        return
    HALF: gl.constexpr = C // 2
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_a = gl.allocate_shared_memory(dtype, [BH, HALF], half_desc.layout)
    q_b = gl.allocate_shared_memory(dtype, [BH, HALF], half_desc.layout)
    k_a = gl.allocate_shared_memory(dtype, [STAGES, BN, HALF], half_desc.layout)
    k_b = gl.allocate_shared_memory(dtype, [STAGES, BN, HALF], half_desc.layout)
    k_r = gl.allocate_shared_memory(dtype, [STAGES, BN, R], rope_desc.layout)
    p_s = gl.allocate_shared_memory(dtype, [STAGES, BH, BN], rope_desc.layout)
    old_s = gl.allocate_shared_memory(gl.float32, [STAGES, BH], PLAIN)
    inverse_s = gl.allocate_shared_memory(gl.float32, [BH], PLAIN)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    p_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    done = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(p_full.index(i), count=1)
    mbarrier.init(done, count=1)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    h = first_head.to(gl.int64)
    q_at = q_latent_ptr + b * q_latent_stride_b + h * q_latent_stride_h
    q_a.store(load_query(q_at, own_heads, q_latent_stride_h, BH, HALF, WIDE))
    q_b.store(load_query(q_at + HALF, own_heads, q_latent_stride_h, BH, HALF, WIDE))
    q_at = q_rope_ptr + b * q_rope_stride_b + h * q_rope_stride_h
    p_s.index(0).store(load_query(q_at, own_heads, q_rope_stride_h, BH, R, NARROW))
    fence_async_shared()
    num_tokens = length - first_tile * BN
    gl.warp_specialize(
        [
            (gather, (
                p_s, k_a, old_s, inverse_s, k_full, k_empty, p_full, done, part_ptr, row,
                own_heads, num_tokens, num_tiles, splits, 0, C, BH, BN, STAGES,
            )),
            (gather, (
                p_s, k_b, old_s, inverse_s, k_full, k_empty, p_full, done, part_ptr, row,
                own_heads, num_tokens, num_tiles, splits, HALF, C, BH, BN, STAGES,
            )),
            (weigh, (
                q_a, q_b, k_a, k_b, k_r, p_s, old_s, inverse_s, k_full, p_full, done, lse_ptr,
                row, own_heads, num_tokens, num_tiles, scale, splits, BH, BN, STAGES, SLACK,
            )),
            (load_tiles, (
                k_a, k_b, k_r, k_full, k_empty, half_desc, rope_desc,
                table_ptr + b * table_stride, first_tile, num_tiles, page_rows,
                L, C, R, BN, STAGES,
            )),
        ],
        [4, 4, 1],
        [GATHER_REGISTERS, WEIGH_REGISTERS, 24],
    )  # fmt: skip


def run(
    q_latent_BHC: Tensor,
    q_rope_BHR: Tensor,
    pages_PLX: Tensor,
    page_table_BM: Tensor,
    lengths_B: Tensor,
    part_BHSC: Tensor,
    lse_BHS: Tensor,
    scale: float,
) -> None:
    """Fill `part` and `lse` of every piece; what `op.uses_gluon` lets through."""
    num_rows, num_heads, splits, latent = part_BHSC.shape
    num_pages, page, width = pages_PLX.shape
    page_rows = pages_PLX.stride(0) // pages_PLX.stride(1)
    shape, strides = [(num_pages - 1) * page_rows + page, width], [pages_PLX.stride(1), 1]
    half, rope = (
        TensorDescriptor(pages_PLX, shape, strides, [TOKENS, columns], _LAYOUT)
        for columns in (latent // 2, width - latent)
    )
    mla_decode_kernel[(num_rows * splits * triton.cdiv(num_heads, HEADS),)](
        half,
        rope,
        q_latent_BHC,
        q_rope_BHR,
        page_table_BM,
        lengths_B,
        part_BHSC,
        lse_BHS,
        num_heads,
        *q_latent_BHC.stride()[:2],
        *q_rope_BHR.stride()[:2],
        page_rows,
        page_table_BM.stride(0),
        page_table_BM.shape[1] * page,
        scale * math.log2(math.e),
        splits,
        L=page,
        C=latent,
        R=width - latent,
        BH=HEADS,
        BN=TOKENS,
        STAGES=STAGES,
        SLACK=SLACK,
        GATHER_REGISTERS=GATHER_REGISTERS,
        WEIGH_REGISTERS=WEIGH_REGISTERS,
        num_warps=4,
    )
