"""Both products of experts of few rows in one launch, in Gluon for Hopper.

A program belongs to a route, and is done at once unless it is the first of its expert's. It finds
the expert's rows among all, and goes through the expert's width in blocks of 64: gate and up, in
halves of the inputs, SiTU-GLU, and what the block adds to the outputs, in two halves. Each of the
four kinds of tiles has a buffer of 16 KB, into which TMA brings the next tile as soon as one is
multiplied, so that three programs of a multiprocessor have about 150 KB under way.
Values between the products are rounded as by two launches, and sums are in the same order: the
same bits. At 64 tokens, 8 of 480 experts of 256 -> 192 each on an H200: 93 MB, 22 us at the rate
of a copy; 64 tokens alone: two launches 31.9 us, one 27.2.
Not interpretable: import it only where it runs.

Legend: T tokens, R routes, E experts, D width, I expert width.
"""

from __future__ import annotations

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

from k3_kernels.early import early_launch, wait_for_inputs
from k3_kernels.moe_experts.backward import Stacks
from k3_kernels.moe_experts.rows import Betas
from k3_kernels.tl_math import situ

ROWS, BLOCK = 8, 64
"""Rows that a program multiplies at once; expert width of a block."""
_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@gluon.jit
def load_pair(desc_0, desc_1, at_0, at_1, full, buffers, is_wanted):
    """A tile each into two buffers, whose barriers then are full."""
    BYTES: gl.constexpr = 2 * desc_0.block_shape[0] * desc_0.block_shape[1]
    mbarrier.expect(full.index(0), BYTES, pred=is_wanted)
    tma.async_copy_global_to_shared(desc_0, at_0, full.index(0), buffers.index(0), is_wanted)
    mbarrier.expect(full.index(1), BYTES, pred=is_wanted)
    tma.async_copy_global_to_shared(desc_1, at_1, full.index(1), buffers.index(1), is_wanted)


@gluon.jit
def multiply_pair(buffers, full, phase, right, acc_0, acc_1):
    """acc plus the tiles of two buffers, when these are full, times `right`."""
    mbarrier.wait(full.index(0), phase)
    acc_0 = warpgroup_mma(buffers.index(0), right, acc_0, is_async=True)
    mbarrier.wait(full.index(1), phase)
    acc_1 = warpgroup_mma(buffers.index(1), right, acc_1, is_async=True)
    return warpgroup_mma_wait(0, deps=[acc_0, acc_1])


@gluon.jit
def routes_from(candidate, own, count, RPAD: gl.constexpr, BM: gl.constexpr):
    """The first `count` of the routes `candidate` from `own` on, [BM]."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
    i = gl.arange(0, BM, layout=LAYOUT)
    route = gl.zeros((BM,), gl.int32, LAYOUT)
    last = own - 1
    for k in range(count):
        last = gl.min(gl.where(candidate > last, candidate, RPAD), axis=0)
        route = gl.where(i == k, last, route)
    return route


@gluon.jit
def load_rows(x_ptr, x_s, token, is_row, D: gl.constexpr):
    """Rows of x into shared memory, in two halves of the inputs."""
    HALF: gl.constexpr = D // 2
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    d = gl.arange(0, HALF, layout=gl.SliceLayout(0, LAYOUT))
    at = x_ptr + token.to(gl.int64)[:, None] * D + d[None, :]
    low = gl.load(at, mask=is_row[:, None], other=0.0)
    high = gl.load(at + HALF, mask=is_row[:, None], other=0.0)
    x_s.index(0).store(low)
    x_s.index(1).store(high)
    fence_async_shared()


@gluon.jit
def store_half(acc, out_ptr, route, count, first: gl.constexpr, D: gl.constexpr):
    """Outputs [D / 2, BM] from `first` on, of `count` routes."""
    n = first + gl.arange(0, D // 2, layout=gl.SliceLayout(1, acc.type.layout))
    COLUMNS: gl.constexpr = gl.SliceLayout(0, acc.type.layout)
    is_row = gl.arange(0, acc.shape[1], layout=COLUMNS) < count
    at = out_ptr + gl.convert_layout(route, COLUMNS).to(gl.int64)[None, :] * D + n[:, None]
    gl.store(at, acc.to(out_ptr.dtype.element_ty), mask=is_row[None, :])


@gluon.jit
def few_rows_kernel(
    gate_desc, up_desc, down_desc, x_ptr, idx_ptr, out_ptr, beta, linear_beta,
    num_rows, num_experts, num_blocks,
    NUM_ROUTES: gl.constexpr, D: gl.constexpr, INNER: gl.constexpr, HAS_CAP: gl.constexpr,
    RPAD: gl.constexpr, BM: gl.constexpr, BI: gl.constexpr, IS_EARLY: gl.constexpr,
):  # fmt: skip
    """out [R, D] = w2 situ(w1 x, w3 x) of x [T, D], R in the order of the routes. Grid: routes."""
    dtype: gl.constexpr = gate_desc.dtype
    HALF: gl.constexpr = D // 2
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    up_s = gl.allocate_shared_memory(dtype, [2, BI, HALF], gate_desc.layout)
    down_s = gl.allocate_shared_memory(dtype, [2, HALF, BI], down_desc.layout)
    x_s = gl.allocate_shared_memory(dtype, [2, BM, HALF], gate_desc.layout)
    h_s = gl.allocate_shared_memory(dtype, [BM, BI], gate_desc.layout)
    up_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    down_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(up_full.index(i), count=1)
        mbarrier.init(down_full.index(i), count=1)
    fence_async_shared()
    wait_for_inputs(IS_EARLY)
    own = gl.program_id(0)
    expert = gl.load(idx_ptr + own).to(gl.int32)
    r = gl.arange(0, RPAD, layout=gl.BlockedLayout([1], [32], [4], [0]))
    is_same = gl.load(idx_ptr + r, mask=r < num_rows, other=-1) == expert
    rank = gl.sum((is_same & (r < own)).to(gl.int32), axis=0)
    if (expert < 0) | (expert >= num_experts) | (rank % BM != 0):
        return
    up_row = expert * INNER
    down_row = expert * D
    load_pair(gate_desc, up_desc, [up_row, 0], [up_row, 0], up_full, up_s, True)
    load_pair(down_desc, down_desc, [down_row, 0], [down_row + HALF, 0], down_full, down_s, True)
    count = gl.minimum(gl.sum(is_same.to(gl.int32), axis=0) - rank, BM)
    route = routes_from(gl.where(is_same, r, RPAD), own, count, RPAD, BM)
    is_row = gl.arange(0, BM, layout=route.type.layout) < count
    load_rows(x_ptr, x_s, route // NUM_ROUTES, is_row, D)
    x_low, x_high = x_s.index(0).permute((1, 0)), x_s.index(1).permute((1, 0))
    zeros = gl.zeros((BI, BM), gl.float32, ACC)
    low = gl.zeros((HALF, BM), gl.float32, ACC)
    high = low
    for block in range(num_blocks):
        inner = (block + 1) * BI
        has_next = block + 1 < num_blocks
        gate, up = multiply_pair(up_s, up_full, 0, x_low, zeros, zeros)
        at = [up_row + block * BI, HALF]
        load_pair(gate_desc, up_desc, at, at, up_full, up_s, True)
        gate, up = multiply_pair(up_s, up_full, 1, x_high, gate, up)
        at = [up_row + inner, 0]
        load_pair(gate_desc, up_desc, at, at, up_full, up_s, has_next)
        h = situ(gate, up, beta, linear_beta, HAS_CAP, False)
        h_s.permute((1, 0)).store(h.to(dtype))
        fence_async_shared()
        low, high = multiply_pair(down_s, down_full, block & 1, h_s.permute((1, 0)), low, high)
        low_at, high_at = [down_row, inner], [down_row + HALF, inner]
        load_pair(down_desc, down_desc, low_at, high_at, down_full, down_s, has_next)
    store_half(low, out_ptr, route, count, 0, D)
    store_half(high, out_ptr, route, count, HALF, D)


def run(x_TD: Tensor, idx_R: Tensor, stacks: Stacks, betas: Betas) -> Tensor:
    """w2 situ(w1 x, w3 x) [R, D] of every route, for stacks that `op.takes_one_launch` lets by.

    The row of a route whose expert does not exist is not written.
    """
    w1, w3, w2 = (stack for stack in stacks if isinstance(stack, Tensor))
    (num_experts, inner, width), num_rows = w1.shape, len(idx_R)
    out_RD = x_TD.new_empty(num_rows, width)
    beta, linear_beta = betas
    few_rows_kernel[(num_rows,)](
        *(_describe(w, BLOCK, width // 2) for w in (w1, w3)),
        _describe(w2, width // 2, BLOCK),
        x_TD,
        idx_R,
        out_RD,
        float(beta),
        1.0 if linear_beta is None else float(linear_beta),
        num_rows,
        num_experts,
        inner // BLOCK,
        NUM_ROUTES=num_rows // len(x_TD),
        D=width,
        INNER=inner,
        HAS_CAP=linear_beta is not None,
        RPAD=max(128, triton.next_power_of_2(num_rows)),
        BM=ROWS,
        BI=BLOCK,
        **early_launch(len(x_TD), x_TD.device),
        num_warps=4,
    )
    return out_RD


def _describe(stack: Tensor, rows: int, columns: int) -> TensorDescriptor:
    flat = stack.view(-1, stack.shape[-1])
    return TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [rows, columns], _LAYOUT)
