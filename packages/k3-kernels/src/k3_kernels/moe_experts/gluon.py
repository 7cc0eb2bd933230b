"""The grouped products of a training call in Gluon, for Hopper: one kernel in four forms.

A program goes through tiles of up to 192 x 256. One warp loads what three warpgroups multiply, 64
rows each, and is on with the next tile while they write theirs, which leaves through shared memory
in chunks of 64 outputs. An expert's rows are shared out evenly: 292 are five times 64, in tiles of
128 and 192. A tile of 192 moves 37 bytes a cycle at the full rate, one of 128 rows 48, and the L2
cache of an H200 gives about 30 to each multiprocessor. Shared memory: 96 bytes a cycle are read (a
product of 256 columns at once would read 80, but ptxas takes those with fewer threads only).
Gradients of weights have five steps a tile and much to write: tiles of 128 x 256, of which each of
two warpgroups writes its half at once; their sums end at the next 16 rows.
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

from k3_kernels.moe_experts.rows import Betas, PaddedPlan
from k3_kernels.tl_math import sigmoid, situ

ROWS, OUTPUTS, STEP, CHUNK = 64, 256, 64, 64
"""Rows of a warpgroup, outputs of a tile, inputs a step, outputs that are written at once."""
STAGES = 3
"""Steps loaded ahead: what shared memory holds beside the results that wait to be written."""
GLU, FORWARD, BACKWARD, WEIGHTS = range(4)
"""Forms: both up-projections with SiTU-GLU; weights [N, K]; weights [K, N]; left^T right."""
WARPGROUPS = (3, 3, 3, 2)
"""Of a program, by form. On an H200, 32,768 rows: both up-projections 2302 us with three, 3439 with
two; a gradient of weights 1461 with three, 1235 with two that each write their half at once, 1364
when they write it in chunks."""
REGISTERS = {2: 240, 3: 160}
"""Of a thread of so many warpgroups; the loading warp gets 24."""
GROUPS = (4, 2, 2, 4)
"""By form: tiles that are neighbours in time share a column block of weights."""
_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@gluon.jit
def find_tile(
    t, tiles,
    NUM_BLOCKS: gl.constexpr, GROUP: gl.constexpr, IS_WEIGHTS: gl.constexpr, ROWS: gl.constexpr,
    BK: gl.constexpr, UNITS: gl.constexpr,
):  # fmt: skip
    """(expert, first row of the result in it, block of outputs, first row, steps, warpgroups).

    Of gradients of weights, which give every warpgroup work, the last is the rows in sixteens.
    """
    expert_ptr, row_ptr, size_ptr, starts_ptr, num_steps, K = tiles
    # The tiles of a group take turns, so that no program gets the short ones alone.
    turn = t // GROUP // gl.maximum(gl.num_programs(0) // GROUP, 1)
    if IS_WEIGHTS:
        blocks_m = K // (UNITS * ROWS)
        expert = t // (blocks_m * NUM_BLOCKS)
        inner = t % (blocks_m * NUM_BLOCKS)
        group = inner // (GROUP * NUM_BLOCKS) * GROUP
        width = gl.minimum(blocks_m - group, GROUP)
        m = (group + inner % (GROUP * NUM_BLOCKS) % width) * (UNITS * ROWS)
        block = inner % (GROUP * NUM_BLOCKS) // width
        row = gl.load(starts_ptr + expert)
        pieces = (gl.load(size_ptr + expert + 1) - gl.load(size_ptr + expert) + 15) // 16
        return expert, m, block, row, (pieces * 16 + BK - 1) // BK, pieces
    else:
        inner = t % (GROUP * NUM_BLOCKS)
        tile = t // (GROUP * NUM_BLOCKS) * GROUP + (inner + turn) % GROUP
        expert = gl.load(expert_ptr + tile)
        row = gl.load(row_ptr + tile)
        units = (gl.load(size_ptr + tile) + ROWS - 1) // ROWS
        is_tile = expert >= 0
        steps = gl.where(is_tile, num_steps, 0)
        return expert, row, inner // GROUP, row, steps, gl.where(is_tile, units, 0)


@gluon.jit
def load_steps(
    own, tiles,
    NUM_BLOCKS: gl.constexpr, GROUP: gl.constexpr, FORM: gl.constexpr, SOURCES: gl.constexpr,
    SIDES: gl.constexpr, STAGES: gl.constexpr, UNITS: gl.constexpr,
):  # fmt: skip
    """Every step of every tile, as soon as its buffers are free.

    SOURCES 2: half of the steps take more_left and more_right. SIDES 2: so does half of the blocks.
    """
    left_smem, right_smem, full, empty, left, more_left, right, more_right, num_tiles, N = own
    num_steps, K = tiles[4], tiles[5]
    IS_WEIGHTS: gl.constexpr = FORM == 3
    ROWS: gl.constexpr = 64
    BK: gl.constexpr = 64
    BN: gl.constexpr = 256
    count = 0
    for t in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        expert, m, block, row, steps, units = find_tile(
            t, tiles, NUM_BLOCKS, GROUP, IS_WEIGHTS, ROWS, BK, UNITS
        )
        for i in range(steps):
            stage = count % STAGES
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), (count // STAGES) & 1 ^ 1)
            count += 1
            b = right_smem.index(stage)
            k = i * BK
            is_more = (SOURCES == 2) & (i >= num_steps // 2)
            if SOURCES == 2:
                k = gl.where(is_more, k - K, k)
            if IS_WEIGHTS:
                mbarrier.expect(bar, (BN + UNITS * ROWS) * BK * 2)
            else:
                for u in gl.static_range(UNITS):
                    mbarrier.expect(bar, (BN + (u + 1) * ROWS) * BK * 2, pred=units == u + 1)
            for u in gl.static_range(UNITS):
                a = left_smem.index(UNITS * stage + u)
                has = (units > 0) if IS_WEIGHTS else (u < units)
                at = [row + k, m + u * ROWS] if IS_WEIGHTS else [row + u * ROWS, k]
                if SOURCES == 2:
                    tma.async_copy_global_to_shared(more_left, at, bar, a, has & is_more)
                    has = has & (is_more == 0)
                tma.async_copy_global_to_shared(left, at, bar, a, has)
            if FORM == 3:
                tma.async_copy_global_to_shared(right, [row + k, block * BN], bar, b)
            elif FORM == 2:
                at = [expert * K + k, block * BN]
                if SOURCES == 2:
                    tma.async_copy_global_to_shared(more_right, at, bar, b, is_more)
                    tma.async_copy_global_to_shared(right, at, bar, b, is_more == 0)
                else:
                    tma.async_copy_global_to_shared(right, at, bar, b)
            elif FORM == 0:
                at = [expert * N + block * (BN // 2), k]
                tma.async_copy_global_to_shared(right, at, bar, b.slice(0, BN // 2))
                tma.async_copy_global_to_shared(more_right, at, bar, b.slice(BN // 2, BN // 2))
            elif SIDES == 2 and block >= NUM_BLOCKS // 2:
                at = [expert * N + (block - NUM_BLOCKS // 2) * BN, k]
                tma.async_copy_global_to_shared(more_right, at, bar, b)
            else:
                tma.async_copy_global_to_shared(right, [expert * N + block * BN, k], bar, b)


@gluon.jit
def halves(x):
    """The left and the right half of the columns."""
    return x.reshape((x.shape[0], 2, x.shape[1] // 2)).permute((0, 2, 1)).split()


@gluon.jit
def write_pair(staged, x, first: gl.constexpr, out, row, column):
    """Two chunks of results through the two buffers of a warpgroup, as each is read out."""
    low, high = halves(x)
    for i in gl.static_range(2):
        tma.store_wait(1)
        buffer = staged.index(first + i)
        buffer.store((low if i == 0 else high).to(out.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(out, [row, column + i * (x.shape[1] // 2)], buffer)


@gluon.jit
def multiply_some(a, b, acc, pieces):
    """acc + a^T b over the first 16, 32 or 48 rows of both."""
    if pieces > 1:
        first = warpgroup_mma(a.slice(0, 32).permute((1, 0)), b.slice(0, 32), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[first])
    if pieces == 1:
        one = warpgroup_mma(a.slice(0, 16).permute((1, 0)), b.slice(0, 16), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[one])
    if pieces == 3:
        last = warpgroup_mma(a.slice(32, 16).permute((1, 0)), b.slice(32, 16), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[last])
    return acc


@gluon.jit
def tanh(x):
    """To 2^-11 of its value, a quarter of what bfloat16 rounds away."""
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def gated(gate, up, beta, linear_beta, HAS_CAP: gl.constexpr, IS_BF16: gl.constexpr):
    """SiTU-GLU. For bfloat16 in 14 instructions a value, where `situ` takes 51."""
    if IS_BF16:
        if HAS_CAP:
            up = linear_beta * tanh(up * (1.0 / linear_beta))
        return beta * tanh(gate * (1.0 / beta)) * sigmoid(gate) * up
    else:
        return situ(gate, up, beta, linear_beta, HAS_CAP, False)


@gluon.jit
def multiply(
    UNIT: gl.constexpr, own, tiles,
    NUM_BLOCKS: gl.constexpr, GROUP: gl.constexpr, FORM: gl.constexpr, SIDES: gl.constexpr,
    HAS_CAP: gl.constexpr, STAGES: gl.constexpr, UNITS: gl.constexpr,
):  # fmt: skip
    """One warpgroup: 64 rows of every tile."""
    left_smem, right_smem, staged, full, empty, out, more_out, num_tiles, beta, linear_beta = own
    IS_WEIGHTS: gl.constexpr = FORM == 3
    ROWS: gl.constexpr = 64
    BK: gl.constexpr = 64
    BN: gl.constexpr = 256
    WIDTH: gl.constexpr = BN if UNITS < 3 else BN // 2
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    count = 0
    expert, m, block, _row, steps, units = find_tile(
        gl.program_id(0), tiles, NUM_BLOCKS, GROUP, IS_WEIGHTS, ROWS, BK, UNITS
    )
    for t in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        # Read while this tile's products run.
        next_expert, next_m, next_block, _row, next_steps, next_units = find_tile(
            gl.minimum(t + gl.num_programs(0), gl.maximum(num_tiles, 1) - 1), tiles, NUM_BLOCKS,
            GROUP, IS_WEIGHTS, ROWS, BK, UNITS,
        )  # fmt: skip
        if IS_WEIGHTS:
            whole = units * 16 // BK
            is_own = True
        else:
            whole = steps
            is_own = units > UNIT
        if is_own:
            acc = gl.zeros((ROWS, BN), gl.float32, ACC)
            for i in range(whole):
                stage = count % STAGES
                mbarrier.wait(full.index(stage), (count // STAGES) & 1)
                a = left_smem.index(UNITS * stage + UNIT)
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
            mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), pred=whole > 0)
            at = m + UNIT * ROWS
            if FORM == 3:
                if steps > whole:
                    stage = count % STAGES
                    mbarrier.wait(full.index(stage), (count // STAGES) & 1)
                    a = left_smem.index(UNITS * stage + UNIT)
                    acc = multiply_some(a, right_smem.index(stage), acc, units % 4)
                    mbarrier.arrive(empty.index(stage))
                    count += 1
                tma.store_wait(0)
                buffer = staged.index(UNIT)
                buffer.store(acc.to(out.dtype))
                fence_async_shared()
                tma.async_copy_shared_to_global(out, [expert * tiles[5] + at, block * BN], buffer)
            elif FORM == 0:
                gate, up = halves(acc)
                h = gated(gate, up, beta, linear_beta, HAS_CAP, out.dtype == gl.bfloat16)
                write_pair(staged, h, 2 * UNIT, out, at, block * (BN // 2))
            else:
                low, high = halves(acc)
                if SIDES == 2 and block >= NUM_BLOCKS // 2:
                    column = (block - NUM_BLOCKS // 2) * BN
                    write_pair(staged, low, 2 * UNIT, more_out, at, column)
                    write_pair(staged, high, 2 * UNIT, more_out, at, column + BN // 2)
                else:
                    write_pair(staged, low, 2 * UNIT, out, at, block * BN)
                    write_pair(staged, high, 2 * UNIT, out, at, block * BN + BN // 2)
        else:
            for _ in range(steps):
                stage = count % STAGES
                mbarrier.wait(full.index(stage), (count // STAGES) & 1)
                mbarrier.arrive(empty.index(stage))
                count += 1
        expert, m, block = next_expert, next_m, next_block
        steps, units = next_steps, next_units
    tma.store_wait(0)


@gluon.jit
def product_kernel(
    left, more_left, right, more_right, out, more_out,
    expert_ptr, row_ptr, size_ptr, starts_ptr, num_tiles, num_steps, N, K,
    beta, linear_beta,
    NUM_BLOCKS: gl.constexpr, GROUP: gl.constexpr, FORM: gl.constexpr, SOURCES: gl.constexpr,
    SIDES: gl.constexpr, HAS_CAP: gl.constexpr, STAGES: gl.constexpr, UNITS: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """Tiles of `FORM`, num_tiles of them over all programs.

    Of weights' gradients, K: their rows; size_ptr: first row of each expert without padding.
    """
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    left_smem = gl.allocate_shared_memory(left.dtype, [UNITS * STAGES, 64, 64], left.layout)
    if FORM < 2:
        right_smem = gl.allocate_shared_memory(left.dtype, [STAGES, 256, 64], right.layout)
    else:
        right_smem = gl.allocate_shared_memory(left.dtype, [STAGES, 64, 256], right.layout)
    if FORM < 3:
        staged = gl.allocate_shared_memory(out.dtype, [2 * UNITS, 64, 64], out.layout)
    else:
        staged = gl.allocate_shared_memory(out.dtype, [UNITS, 64, 256], out.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=UNITS)
    fence_async_shared()
    tiles = (expert_ptr, row_ptr, size_ptr, starts_ptr, num_steps, K)
    if FORM < 3:
        # Behind the sizes of all tiles that there may be.
        num_groups = (gl.load(size_ptr + num_tiles // NUM_BLOCKS) + GROUP - 1) // GROUP
        num_tiles = gl.minimum(num_groups * (GROUP * NUM_BLOCKS), num_tiles)
    load = (left_smem, right_smem, full, empty, left, more_left, right, more_right, num_tiles, N)
    own = (left_smem, right_smem, staged, full, empty, out, more_out, num_tiles, beta, linear_beta)
    if UNITS == 3:
        gl.warp_specialize(
            [
                (multiply, (0, own, tiles, NUM_BLOCKS, GROUP, FORM, SIDES, HAS_CAP, STAGES, UNITS)),
                (multiply, (1, own, tiles, NUM_BLOCKS, GROUP, FORM, SIDES, HAS_CAP, STAGES, UNITS)),
                (multiply, (2, own, tiles, NUM_BLOCKS, GROUP, FORM, SIDES, HAS_CAP, STAGES, UNITS)),
                (load_steps, (load, tiles, NUM_BLOCKS, GROUP, FORM, SOURCES, SIDES, STAGES, UNITS)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (multiply, (0, own, tiles, NUM_BLOCKS, GROUP, FORM, SIDES, HAS_CAP, STAGES, UNITS)),
                (multiply, (1, own, tiles, NUM_BLOCKS, GROUP, FORM, SIDES, HAS_CAP, STAGES, UNITS)),
                (load_steps, (load, tiles, NUM_BLOCKS, GROUP, FORM, SOURCES, SIDES, STAGES, UNITS)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )


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
    num_blocks = n // OUTPUTS
    left, right = _describe(left_SM, STEP, ROWS), _describe(right_SN, STEP, OUTPUTS)
    outs = _describe(out, ROWS, OUTPUTS)
    num_tiles = num_experts * (m // (ROWS * WARPGROUPS[WEIGHTS])) * num_blocks
    descriptors = left, left, right, right, outs, outs
    _launch(descriptors, plan, WEIGHTS, num_tiles, (0, n, m), num_blocks)
    return out


def _launch_rows(
    form: int,
    rows: list[Tensor],
    weights: list[Tensor],
    outs: list[Tensor],
    plan: PaddedPlan,
    betas: Betas = (1.0, None),
) -> None:
    """One or two of rows, of weights and of results: halves of the steps or of the outputs."""
    n, k = weights[0].shape[1:] if form != BACKWARD else weights[0].shape[:0:-1]
    width = OUTPUTS // 2 if form == GLU else OUTPUTS
    matrices = (STEP, OUTPUTS) if form == BACKWARD else (width, STEP)
    descriptors = (
        *(_describe(x, ROWS, STEP) for x in (rows[0], rows[-1])),
        *(_describe(w, *matrices) for w in (weights[0], weights[-1])),
        *(_describe(out, ROWS, CHUNK) for out in (outs[0], outs[-1])),
    )
    num_blocks = len(outs) * n // width
    num_tiles = plan.tile_expert.numel() * num_blocks
    sizes = len(rows) * k // STEP, n, k
    _launch(descriptors, plan, form, num_tiles, sizes, num_blocks, len(rows), len(outs), betas)


def _launch(
    descriptors: tuple[TensorDescriptor, ...],
    plan: PaddedPlan,
    form: int,
    num_tiles: int,
    sizes: tuple[int, int, int],
    num_blocks: int,
    sources: int = 1,
    sides: int = 1,
    betas: Betas = (1.0, None),
) -> None:
    """sizes: steps, N and K of `product_kernel`."""
    beta, linear_beta = betas
    units = WARPGROUPS[form]
    product_kernel[(min(num_tiles, _num_processors(plan.starts.device)),)](
        *descriptors,
        plan.tile_expert,
        plan.tile_row,
        plan.begins if form == WEIGHTS else plan.tile_size,
        plan.starts,
        num_tiles,
        *sizes,
        float(beta),
        1.0 if linear_beta is None else float(linear_beta),
        NUM_BLOCKS=num_blocks,
        GROUP=GROUPS[form],
        FORM=form,
        SOURCES=sources,
        SIDES=sides,
        HAS_CAP=linear_beta is not None,
        STAGES=STAGES,
        UNITS=units,
        REGISTERS=REGISTERS[units],
        num_warps=4,
    )


@cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _describe(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    flat = x.view(-1, x.shape[-1])
    return TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [rows, columns], _LAYOUT)
