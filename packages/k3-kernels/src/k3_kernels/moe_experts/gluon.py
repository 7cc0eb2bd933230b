"""The grouped products of a training call in Gluon, for Hopper: one kernel in four forms.

A program goes through tiles of 128 x 256. One warp loads what two warpgroups multiply, 64 rows
each, and is on with the next tile while they write theirs, which leaves through shared memory. Of
an expert's last tile the second half is left out when it holds no row: 292 rows are five times 64.
At the full rate the tensor cores read 80 bytes a cycle from shared memory and 48 arrive there, of
128 in all.
Not interpretable: import it only where it runs.

Legend: S padded rows, E experts, M rows and N outputs of a product, K its inputs.
"""

from __future__ import annotations

from functools import cache

import torch
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

from k3_kernels.moe_experts.plan import GROUP
from k3_kernels.moe_experts.rows import Betas, PaddedPlan
from k3_kernels.tl_math import situ

HALF, OUTPUTS, STEP, STAGES = 64, 256, 64, 3
"""Rows of a warpgroup, outputs of a tile, inputs a step, steps that are loaded ahead."""
STAGES_GLU = 4
"""Of the form that writes half as much."""
_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
REGISTERS = 240
"""Of a thread of the second warpgroup; the first gets as many, the loading warp 24."""
GLU, FORWARD, BACKWARD, WEIGHTS = range(4)
"""Forms: both up-projections with SiTU-GLU; weights [N, K]; weights [K, N]; left^T right."""


@gluon.jit
def find_tile(
    t, expert_ptr, row_ptr, size_ptr, starts_ptr,
    NUM_BLOCKS: gl.constexpr, BLOCKS_M: gl.constexpr, GROUP: gl.constexpr, IS_WEIGHTS: gl.constexpr,
):  # fmt: skip
    """(expert, first row, block of outputs, rows of the tile or of the expert)."""
    if IS_WEIGHTS:
        expert = t // (BLOCKS_M * NUM_BLOCKS)
        inner = t % (BLOCKS_M * NUM_BLOCKS)
        group = inner // (GROUP * NUM_BLOCKS) * GROUP
        width = gl.minimum(BLOCKS_M - group, GROUP)
        m = group + inner % (GROUP * NUM_BLOCKS) % width
        block = inner % (GROUP * NUM_BLOCKS) // width
        start = gl.load(starts_ptr + expert)
        return expert, m * 128, block, start, gl.load(starts_ptr + expert + 1) - start
    else:
        inner = t % (GROUP * NUM_BLOCKS)
        tile = t // (GROUP * NUM_BLOCKS) * GROUP + inner % GROUP
        row = gl.load(row_ptr + tile)
        return gl.load(expert_ptr + tile), row, inner // GROUP, row, gl.load(size_ptr + tile)


@gluon.jit
def load_steps(
    left_smem, right_smem, full, empty, left, more_left, right, more_right,
    expert_ptr, row_ptr, size_ptr, starts_ptr, num_tiles, num_steps, N, K,
    NUM_BLOCKS: gl.constexpr, BLOCKS_M: gl.constexpr, GROUP: gl.constexpr, FORM: gl.constexpr,
    SOURCES: gl.constexpr, SIDES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Every step of every tile, as soon as its buffers are free.

    SOURCES 2: half of the steps take more_left and more_right. SIDES 2: so does half of the blocks.
    """
    IS_WEIGHTS: gl.constexpr = FORM == 3
    HALF: gl.constexpr = left_smem.shape[2] if IS_WEIGHTS else left_smem.shape[1]
    BK: gl.constexpr = left_smem.shape[1] if IS_WEIGHTS else left_smem.shape[2]
    BN: gl.constexpr = 256
    count = 0
    for t in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        expert, m, block, row, size = find_tile(
            t, expert_ptr, row_ptr, size_ptr, starts_ptr, NUM_BLOCKS, BLOCKS_M, GROUP, IS_WEIGHTS
        )
        if IS_WEIGHTS:
            steps = size // BK
            both = size >= 0
        else:
            steps = gl.where(expert >= 0, num_steps, 0)
            both = size > HALF
        for i in range(steps):
            stage = count % STAGES
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), (count // STAGES) & 1 ^ 1)
            count += 1
            mbarrier.expect(bar, (BN + 2 * HALF) * BK * 2, pred=both)
            mbarrier.expect(bar, (BN + HALF) * BK * 2, pred=both == 0)
            a = left_smem.index(2 * stage)
            a_more = left_smem.index(2 * stage + 1)
            b = right_smem.index(stage)
            if FORM == 3:
                at = row + i * BK
                tma.async_copy_global_to_shared(left, [at, m], bar, a)
                tma.async_copy_global_to_shared(left, [at, m + HALF], bar, a_more)
                tma.async_copy_global_to_shared(right, [at, block * BN], bar, b)
            elif FORM == 2:
                k = i * BK
                if SOURCES == 2 and i >= num_steps // 2:
                    k -= K
                    tma.async_copy_global_to_shared(more_left, [row, k], bar, a)
                    tma.async_copy_global_to_shared(more_left, [row + HALF, k], bar, a_more, both)
                    tma.async_copy_global_to_shared(
                        more_right, [expert * K + k, block * BN], bar, b
                    )
                else:
                    tma.async_copy_global_to_shared(left, [row, k], bar, a)
                    tma.async_copy_global_to_shared(left, [row + HALF, k], bar, a_more, both)
                    tma.async_copy_global_to_shared(right, [expert * K + k, block * BN], bar, b)
            else:
                k = i * BK
                tma.async_copy_global_to_shared(left, [row, k], bar, a)
                tma.async_copy_global_to_shared(left, [row + HALF, k], bar, a_more, both)
                if FORM == 0:
                    at = expert * N + block * (BN // 2)
                    tma.async_copy_global_to_shared(right, [at, k], bar, b.slice(0, BN // 2))
                    tma.async_copy_global_to_shared(
                        more_right, [at, k], bar, b.slice(BN // 2, BN // 2)
                    )
                elif SIDES == 2 and block >= NUM_BLOCKS // 2:
                    at = expert * N + (block - NUM_BLOCKS // 2) * BN
                    tma.async_copy_global_to_shared(more_right, [at, k], bar, b)
                else:
                    tma.async_copy_global_to_shared(right, [expert * N + block * BN, k], bar, b)


@gluon.jit
def multiply(
    HALF_ID: gl.constexpr, left_smem, right_smem, out_smem, full, empty, out, more_out,
    expert_ptr, row_ptr, size_ptr, starts_ptr, num_tiles, num_steps, beta, linear_beta,
    NUM_BLOCKS: gl.constexpr, BLOCKS_M: gl.constexpr, GROUP: gl.constexpr, FORM: gl.constexpr,
    SIDES: gl.constexpr, HAS_CAP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warpgroup: half of the rows of every tile."""
    IS_WEIGHTS: gl.constexpr = FORM == 3
    HALF: gl.constexpr = left_smem.shape[2] if IS_WEIGHTS else left_smem.shape[1]
    BK: gl.constexpr = left_smem.shape[1] if IS_WEIGHTS else left_smem.shape[2]
    BN: gl.constexpr = 256
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    dtype: gl.constexpr = out_smem.dtype
    staged = out_smem.index(HALF_ID)
    count = 0
    expert, m, block, row, size = find_tile(
        gl.program_id(0), expert_ptr, row_ptr, size_ptr, starts_ptr, NUM_BLOCKS, BLOCKS_M, GROUP,
        IS_WEIGHTS,
    )  # fmt: skip
    for t in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        # Read while this tile's products run.
        next_expert, next_m, next_block, next_row, next_size = find_tile(
            gl.minimum(t + gl.num_programs(0), num_tiles - 1), expert_ptr, row_ptr, size_ptr,
            starts_ptr, NUM_BLOCKS, BLOCKS_M, GROUP, IS_WEIGHTS,
        )  # fmt: skip
        if IS_WEIGHTS:
            steps = size // BK
            is_mine = size >= 0
        else:
            steps = gl.where(expert >= 0, num_steps, 0)
            is_mine = (expert >= 0) & (size > HALF_ID * HALF)
        if is_mine:
            acc = gl.zeros((HALF, BN), gl.float32, ACC)
            for i in range(steps):
                stage = count % STAGES
                mbarrier.wait(full.index(stage), (count // STAGES) & 1)
                a = left_smem.index(2 * stage + HALF_ID)
                b = right_smem.index(stage)
                if FORM == 3:
                    a = a.permute((1, 0))
                if FORM < 2:
                    b = b.permute((1, 0))
                acc = warpgroup_mma(a, b, acc, is_async=True)
                acc = warpgroup_mma_wait(1, deps=[acc])
                mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), pred=i > 0)
                count += 1
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), pred=steps > 0)
            tma.store_wait(0)
            if FORM == 0:
                gate, up = acc.reshape((HALF, 2, BN // 2)).permute((0, 2, 1)).split()
                h = situ(gate, up, beta, linear_beta, HAS_CAP, False)
                staged.store(h.to(dtype))
                fence_async_shared()
                at = block * (BN // 2)
                tma.async_copy_shared_to_global(out, [row + HALF_ID * HALF, at], staged)
            else:
                staged.store(acc.to(dtype))
                fence_async_shared()
                if FORM == 3:
                    at = expert * (BLOCKS_M * 128) + m + HALF_ID * HALF
                    tma.async_copy_shared_to_global(out, [at, block * BN], staged)
                elif SIDES == 2 and block >= NUM_BLOCKS // 2:
                    at = (block - NUM_BLOCKS // 2) * BN
                    tma.async_copy_shared_to_global(more_out, [row + HALF_ID * HALF, at], staged)
                else:
                    at = block * BN
                    tma.async_copy_shared_to_global(out, [row + HALF_ID * HALF, at], staged)
        else:
            for _ in range(steps):
                stage = count % STAGES
                mbarrier.wait(full.index(stage), (count // STAGES) & 1)
                mbarrier.arrive(empty.index(stage))
                count += 1
        expert, m, block, row, size = next_expert, next_m, next_block, next_row, next_size
    tma.store_wait(0)


@gluon.jit
def product_kernel(
    left, more_left, right, more_right, out, more_out,
    expert_ptr, row_ptr, size_ptr, starts_ptr, num_tiles, num_steps, N, K,
    beta, linear_beta,
    NUM_BLOCKS: gl.constexpr, BLOCKS_M: gl.constexpr, GROUP: gl.constexpr, FORM: gl.constexpr,
    SOURCES: gl.constexpr, SIDES: gl.constexpr, HAS_CAP: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """Tiles of `FORM`, num_tiles of them over all programs."""
    BN: gl.constexpr = 256
    dtype: gl.constexpr = left.dtype
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    left_smem = gl.allocate_shared_memory(
        dtype, [2 * STAGES, left.block_shape[0], left.block_shape[1]], left.layout
    )
    if FORM < 2:
        right_smem = gl.allocate_shared_memory(
            dtype, [STAGES, BN, right.block_shape[1]], right.layout
        )
    else:
        right_smem = gl.allocate_shared_memory(
            dtype, [STAGES, right.block_shape[0], BN], right.layout
        )
    out_smem = gl.allocate_shared_memory(
        out.dtype, [2, out.block_shape[0], out.block_shape[1]], out.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (multiply, (
                0, left_smem, right_smem, out_smem, full, empty, out, more_out,
                expert_ptr, row_ptr, size_ptr, starts_ptr, num_tiles, num_steps,
                beta, linear_beta, NUM_BLOCKS, BLOCKS_M, GROUP, FORM, SIDES, HAS_CAP, STAGES,
            )),
            (multiply, (
                1, left_smem, right_smem, out_smem, full, empty, out, more_out,
                expert_ptr, row_ptr, size_ptr, starts_ptr, num_tiles, num_steps,
                beta, linear_beta, NUM_BLOCKS, BLOCKS_M, GROUP, FORM, SIDES, HAS_CAP, STAGES,
            )),
            (load_steps, (
                left_smem, right_smem, full, empty, left, more_left, right, more_right,
                expert_ptr, row_ptr, size_ptr, starts_ptr, num_tiles, num_steps, N, K,
                NUM_BLOCKS, BLOCKS_M, GROUP, FORM, SOURCES, SIDES, STAGES,
            )),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip


def up_product(rows_SD: Tensor, plan: PaddedPlan, w1: Tensor, w3: Tensor, betas: Betas) -> Tensor:
    """situ(w1 x, w3 x) of every row [S, I]."""
    out_SI = rows_SD.new_empty(len(rows_SD), w1.shape[1])
    _launch_rows(GLU, [rows_SD], [w1, w3], [out_SI], plan, betas)
    return out_SI


def gate_and_up(rows_SD: Tensor, plan: PaddedPlan, w1: Tensor, w3: Tensor) -> tuple[Tensor, Tensor]:
    """w1 x and w3 x of every row [S, I]."""
    gate_SI, up_SI = (rows_SD.new_empty(len(rows_SD), w1.shape[1]) for _ in range(2))
    _launch_rows(FORWARD, [rows_SD], [w1, w3], [gate_SI, up_SI], plan)
    return gate_SI, up_SI


def row_product(
    pairs: list[tuple[Tensor, Tensor]], plan: PaddedPlan, has_inputs_last: bool
) -> Tensor:
    """The sum [S, N] of rows [S, K] times weights [E, N, K] (`has_inputs_last`) or [E, K, N]."""
    rows, weights = ([pair[i] for pair in pairs] for i in range(2))
    out_SN = rows[0].new_empty(len(rows[0]), weights[0].shape[1 if has_inputs_last else 2])
    _launch_rows(FORWARD if has_inputs_last else BACKWARD, rows, weights, [out_SN], plan)
    return out_SN


def weight_gradient(left_SM: Tensor, right_SN: Tensor, plan: PaddedPlan) -> Tensor:
    """[E, M, N]: of each expert the sum over its rows of the outer products."""
    num_experts, m, n = plan.starts.numel() - 1, left_SM.shape[1], right_SN.shape[1]
    out = left_SM.new_empty(num_experts, m, n)
    blocks = m // (2 * HALF), n // OUTPUTS
    num_tiles = num_experts * blocks[0] * blocks[1]
    right = _describe(right_SN, STEP, OUTPUTS)
    left, outs = _describe(left_SM, STEP, HALF), _describe(out, HALF, OUTPUTS)
    _launch((left, left, right, right, outs, outs), plan, WEIGHTS, num_tiles, 0, n, 0, blocks)
    return out


def _launch_rows(
    form: int,
    rows: list[Tensor],
    weights: list[Tensor],
    outs: list[Tensor],
    plan: PaddedPlan,
    betas: Betas | None = None,
) -> None:
    """One or two of rows, of weights and of results: halves of the steps or of the outputs."""
    n, k = weights[0].shape[1:] if form != BACKWARD else weights[0].shape[:0:-1]
    width = OUTPUTS // 2 if form == GLU else OUTPUTS
    matrices = (STEP, OUTPUTS) if form == BACKWARD else (width, STEP)
    descriptors = (
        *(_describe(x, HALF, STEP) for x in (rows[0], rows[-1])),
        *(_describe(w, *matrices) for w in (weights[0], weights[-1])),
        *(_describe(out, HALF, width) for out in (outs[0], outs[-1])),
    )
    num_blocks = len(outs) * n // width
    num_tiles = plan.tile_expert.numel() * num_blocks
    num_steps = len(rows) * k // STEP
    _launch(
        descriptors,
        plan,
        form,
        num_tiles,
        num_steps,
        n,
        k,
        (0, num_blocks),
        len(rows),
        len(outs),
        betas or (1.0, None),
    )


def _launch(
    descriptors: tuple[TensorDescriptor, ...],
    plan: PaddedPlan,
    form: int,
    num_tiles: int,
    num_steps: int,
    num_outputs: int,
    num_inputs: int,
    blocks: tuple[int, int],
    sources: int = 1,
    sides: int = 1,
    betas: Betas = (1.0, None),
) -> None:
    beta, linear_beta = betas
    product_kernel[(min(num_tiles, _num_processors(plan.starts.device)),)](
        *descriptors,
        plan.tile_expert,
        plan.tile_row,
        plan.tile_size,
        plan.starts,
        num_tiles,
        num_steps,
        num_outputs,
        num_inputs,
        float(beta),
        1.0 if linear_beta is None else float(linear_beta),
        NUM_BLOCKS=blocks[1],
        BLOCKS_M=blocks[0],
        GROUP=GROUP,
        FORM=form,
        SOURCES=sources,
        SIDES=sides,
        HAS_CAP=linear_beta is not None,
        STAGES=STAGES_GLU if form == GLU else STAGES,
        REGISTERS=REGISTERS,
        num_warps=4,
    )


@cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _describe(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    flat = x.view(-1, x.shape[-1])
    return TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [rows, columns], _LAYOUT)
