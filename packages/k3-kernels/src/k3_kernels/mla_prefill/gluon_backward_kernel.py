"""Backward of mla_prefill on a Hopper GPU in Gluon: every product once, dQ summed in a fixed order.

A program holds 128 keys of one head and goes over the tiles of 64 queries that see them. Two
warpgroups take 64 keys each: S^T and dP^T, the softmax and its backward in registers, dV and dK in
registers; dS^T goes through shared memory, from which each makes its half of the columns of dQ.
One warp loads; one adds the tiles of dQ to a float32 buffer.

The order of these additions is fixed, from the last key tile that a query sees to the first, by a
count for each head and tile of queries: an addition waits for the count of the one before. Programs
take their tiles from a ticket, late keys first, so that what one waits for has started; it begins
at its diagonal, two steps behind its predecessor, and finds each count ready. Still the adding
warp asks for the count before the tile is there, so that the answer travels beside the products. It
hands the tile's memory back as soon as the addition has read it, and the count on when the addition
is done. dQ keeps the order of the registers, in shared memory and in the buffer, so that its stores
meet no bank twice; `unpad_kernel` undoes it.

Floor at T = 8192, H = 96: 5.4 TFLOP, 7.0 ms at 761 TFLOP/s; a step is 3330 cycles of products and
3700 cycles of shared memory. Predicted 10.5 to 11.5 ms, and 0.5 ms for what is before and after.
Measured (H200, 2026-11-30): 12.9 ms when the warp asked with the tile at hand and kept its memory
until the addition was done, 10.9 ms with both changed; with all other kernels and the forward 16.6,
14.6 and, dQ in the order of the registers, 14.3 ms (8 sequences of 1024: 3.2, 3.2 and 2.9 ms).
Not interpretable: import it only where it runs.

Legend: T queries, S keys, P padded queries, N sequences, H heads, D = DA + 2 DB head dim, V value
dim.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from k3_kernels.mla_prefill.gluon_extra import (
    finish_and_release,
    finish_reads,
    load_acquire,
    narrow,
    reduce_add,
)

SIZES = (
    "num_key_tiles", "num_padded", "num_heads",
    "q_stride_h", "k_stride_h", "v_stride_h",
)  # fmt: skip
"""One compiled kernel serves them all; rows are aligned by their widths."""


@gluon.jit
def clear_rows(tile, num_rows, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """Rows from `num_rows` on become zero: they are of another sequence, and 0 * NaN is NaN."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [1, 1], [1, 0])
    row = gl.arange(0, 8, layout=gl.SliceLayout(1, LAYOUT))
    for first in gl.static_range(0, ROWS, 8):
        if first + 8 > num_rows:
            part = tile.slice(first, 8, dim=0)
            part.store(gl.where((first + row < num_rows)[:, None], part.load(LAYOUT), 0.0))


@gluon.jit
def load_tiles(
    k_a, k_b, values, q_a, q_b, d_outs, lses, deltas, kv_full, q_full, q_empty, d_full, d_empty,
    k_a_desc, k_b_desc, v_desc, q_a_desc, q_b_desc, d_out_desc, lse_desc, delta_desc,
    k_row, q_row, d_row, stat_at, k_column, v_column, q_column, d_column, num_keys, num_queries,
    start, stop,
    D: gl.constexpr, DA: gl.constexpr, DB: gl.constexpr, V: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Keys and values once, then each tile of queries as soon as its buffer is free.

    num_keys: from the first of this program on. A tile that ends in another sequence is awaited
    here, by an own barrier, and cleared before it is handed on.
    """
    HALF: gl.constexpr = BN // 2
    is_part = num_keys < BN
    full = kv_full.index(is_part.to(gl.int32))
    mbarrier.expect(full, BN * (D + V) * 2)
    for half in gl.static_range(2):
        row = k_row + half * HALF
        tma.async_copy_global_to_shared(k_a_desc, [row, k_column], full, k_a.index(half))
        for part in gl.static_range(2):
            tma.async_copy_global_to_shared(
                k_b_desc, [row, k_column + DA + part * DB], full, k_b.index(2 * half + part)
            )
        tma.async_copy_global_to_shared(v_desc, [row, v_column], full, values.index(half))
    if is_part:
        mbarrier.wait(full, 0)
        for half in gl.static_range(2):
            clear_rows(k_a.index(half), num_keys - half * HALF, HALF, DA)
            clear_rows(k_b.index(2 * half), num_keys - half * HALF, HALF, DB)
            clear_rows(k_b.index(2 * half + 1), num_keys - half * HALF, HALF, DB)
            clear_rows(values.index(half), num_keys - half * HALF, HALF, V)
        fence_async_shared()
        mbarrier.arrive(kv_full.index(0))
    for i in range(start, stop):
        stage = (i - start) % STAGES
        phase = ((i - start) // STAGES) & 1
        is_part = (i + 1) * BM > num_queries
        row = q_row + i * BM
        full = q_full.index(gl.where(is_part, STAGES, stage))
        mbarrier.wait(q_empty.index(stage), phase ^ 1)
        mbarrier.expect(full, BM * D * 2 + BM * 4)
        tma.async_copy_global_to_shared(q_a_desc, [row, q_column], full, q_a.index(stage))
        for part in gl.static_range(2):
            tma.async_copy_global_to_shared(
                q_b_desc, [row, q_column + DA + part * DB], full, q_b.index(2 * stage + part)
            )
        tma.async_copy_global_to_shared(lse_desc, [stat_at + i * BM], full, lses.index(stage))
        if is_part:
            mbarrier.wait(full, 0)
            clear_rows(q_a.index(stage), num_queries - i * BM, BM, DA)
            clear_rows(q_b.index(2 * stage), num_queries - i * BM, BM, DB)
            clear_rows(q_b.index(2 * stage + 1), num_queries - i * BM, BM, DB)
            fence_async_shared()
            mbarrier.arrive(q_full.index(stage))
        full = d_full.index(stage)
        mbarrier.wait(d_empty.index(stage), phase ^ 1)
        mbarrier.expect(full, BM * V * 2 + BM * 4)
        row = d_row + i * BM
        tma.async_copy_global_to_shared(d_out_desc, [row, d_column], full, d_outs.index(stage))
        tma.async_copy_global_to_shared(delta_desc, [stat_at + i * BM], full, deltas.index(stage))


@gluon.jit
def add_tiles(
    dq_a, dq_b, dq_full, dq_empty, dq_a_desc, dq_b_desc, count_ptr, dq_row, start, stop,
    offset, num_keys, key_tile,
    DA: gl.constexpr, DB: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    """Adds each tile of dQ to the buffer when the key tiles behind this one have added theirs.

    dq_row: the first query's row of [H P]. In the buffer a tile of BM queries is rows of 256.
    """
    ROWS: gl.constexpr = (DA + 2 * DB) * BM // 256
    for i in range(start, stop):
        last = gl.minimum(offset + i * BM + BM - 1, num_keys - 1) // BN
        turn = last - key_tile
        row = (dq_row // BM + i) * ROWS
        count_at = count_ptr + i
        if turn > 0:
            count = load_acquire(count_at)
            while count != turn:
                count = load_acquire(count_at)
        mbarrier.wait(dq_full, (i - start) & 1)
        if turn == 0:
            for half in gl.static_range(2):
                tma.async_copy_shared_to_global(
                    dq_a_desc, [row + half * (DA // 8), 0], dq_a.index(half)
                )
                tma.async_copy_shared_to_global(
                    dq_b_desc, [row + DA // 4 + half * (DB // 4), 0], dq_b.index(half)
                )
        else:
            for half in gl.static_range(2):
                reduce_add(dq_a_desc, [row + half * (DA // 8), 0], dq_a.index(half))
                reduce_add(dq_b_desc, [row + DA // 4 + half * (DB // 4), 0], dq_b.index(half))
        finish_reads(turn)
        mbarrier.arrive(dq_empty)
        finish_and_release(count_at, turn + 1)


@gluon.jit
def fragments(x):
    """An accumulator [64, columns] in the order of its registers, [columns / 4, 256].

    Two rows are 8 columns: the 4 values that each of the 128 threads holds of them, side by side.
    A thread stores 16 bytes at a time; by rows of queries 8, in banks that two rows share.
    """
    COLUMNS: gl.constexpr = x.shape[1]
    x = x.reshape([4, 2, 8, COLUMNS // 8, 4, 2]).permute([3, 0, 2, 4, 1, 5])
    return x.reshape([COLUMNS // 4, 256])


@gluon.jit
def start_scores(k_a, k_b, q_a, q_b, stage, own, zeros):
    """S^T of half of the keys and of a tile of queries, under way."""
    scores = warpgroup_mma(
        k_a.index(own), q_a.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True
    )
    for part in gl.static_range(2):
        queries = q_b.index(2 * stage + part).permute((1, 0))
        scores = warpgroup_mma(k_b.index(2 * own + part), queries, scores, is_async=True)
    return scores


@gluon.jit
def start_queries(HALF_ID: gl.constexpr, none, ds, k_a, k_b, dq_a, dq_b):
    """This warpgroup's columns of a tile of dQ, under way in two parts."""
    WIDTH: gl.constexpr = dq_a.shape[1]
    for half in gl.static_range(2):
        keys = k_a.index(none + half).slice(HALF_ID * WIDTH, WIDTH, dim=1)
        operand = ds.index(none + half).permute((1, 0))
        dq_a = warpgroup_mma(operand, keys, dq_a, use_acc=half > 0, is_async=True)
    for half in gl.static_range(2):
        keys = k_b.index(none + HALF_ID + 2 * half)
        operand = ds.index(none + half).permute((1, 0))
        dq_b = warpgroup_mma(operand, keys, dq_b, use_acc=half > 0, is_async=True)
    return dq_a, dq_b


@gluon.jit
def step(
    i, n, dk_a, dk_b0, dk_b1, dv, HALF_ID: gl.constexpr, k_a, k_b, values, q_a, q_b, d_outs, lses,
    deltas, ds, dq_a_out, dq_b_out, q_full, q_empty, d_full, d_empty, ds_full, ds_empty,
    dq_full, dq_empty, key, offset, scale,
    DA: gl.constexpr, DB: gl.constexpr, V: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr,
    IS_FIRST: gl.constexpr, IS_MASKED: gl.constexpr,
):  # fmt: skip
    """Tile i of the queries, the n-th of this program, but for its dQ and its part of dk_a.

    Those of the tile before come first: the store of dQ runs beside its second part, the softmax
    beside dk_a. Then dS beside dV, the exchange of dS beside dk_b. Nothing is under way between
    steps, since the compiler would move the registers of what is.
    """
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    DQ_A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DA // 2, 16])
    DQ_B: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DB, 16])
    dtype: gl.constexpr = k_a.dtype
    # Zero, which the compiler cannot know: it would keep addresses of all operands in registers.
    none = i >> 30
    own = none + HALF_ID
    stage = n % STAGES
    phase = (n // STAGES) & 1
    d_out = d_outs.index(stage)
    zeros = gl.zeros((key.shape[0], BM), gl.float32, SCORES)
    if IS_FIRST:
        mbarrier.wait(q_full.index(stage), phase)
        scores = start_scores(k_a, k_b, q_a, q_b, stage, own, zeros)
        scores = warpgroup_mma_wait(0, deps=[scores])
    else:
        dq_a = gl.zeros((BM, DA // 2), gl.float32, DQ_A)
        dq_b = gl.zeros((BM, DB), gl.float32, DQ_B)
        dq_a, dq_b = start_queries(HALF_ID, none, ds, k_a, k_b, dq_a, dq_b)
        dq_a = warpgroup_mma_wait(2, deps=[dq_a])
        mbarrier.wait(dq_empty, n & 1)
        dq_a_out.index(own).store(fragments(dq_a))
        mbarrier.wait(q_full.index(stage), phase)
        scores = start_scores(k_a, k_b, q_a, q_b, stage, own, zeros)
        dk_a = warpgroup_mma(ds.index(own), q_a.index((n + 1) % STAGES), dk_a, is_async=True)
        dq_b = warpgroup_mma_wait(4, deps=[dq_b])
        mbarrier.arrive(ds_empty)
        dq_b_out.index(own).store(fragments(dq_b))
        fence_async_shared()
        mbarrier.arrive(dq_full)
        scores = warpgroup_mma_wait(1, deps=[scores])
    lse = lses.index(stage).load(gl.SliceLayout(0, SCORES))
    weights = gl.exp2(scores * scale - lse[None, :])
    if IS_MASKED:
        query = i * BM + gl.arange(0, BM, layout=gl.SliceLayout(0, SCORES))
        weights = gl.where(key[:, None] <= offset + query[None, :], weights, 0.0)
    weights = narrow(weights, dtype)
    operand = gl.convert_layout(weights, gl.DotOperandLayout(0, dv.type.layout, 2))
    mbarrier.wait(d_full.index(stage), phase)
    d_weights = warpgroup_mma(
        values.index(own), d_out.permute((1, 0)), zeros, use_acc=False, is_async=True
    )
    pending_dv = warpgroup_mma(operand, d_out, dv, is_async=True)
    if IS_FIRST:
        d_weights = warpgroup_mma_wait(1, deps=[d_weights])
    else:
        d_weights, dk_a = warpgroup_mma_wait(1, deps=[d_weights, dk_a])
        mbarrier.arrive(q_empty.index((n + 1) % STAGES))
    delta = deltas.index(stage).load(gl.SliceLayout(0, SCORES))
    d_scores = narrow(weights.to(gl.float32) * (d_weights - delta[None, :]), dtype)
    mbarrier.wait(ds_empty, (n & 1) ^ 1)
    ds.index(own).store(d_scores)
    fence_async_shared()
    mbarrier.arrive(ds_full)
    operand = gl.convert_layout(d_scores, gl.DotOperandLayout(0, dk_b0.type.layout, 2))
    pending_b0 = warpgroup_mma(operand, q_b.index(2 * stage), dk_b0, is_async=True)
    pending_b1 = warpgroup_mma(operand, q_b.index(2 * stage + 1), dk_b1, is_async=True)
    dv = warpgroup_mma_wait(2, deps=[pending_dv])
    mbarrier.arrive(d_empty.index(stage))
    mbarrier.wait(ds_full, n & 1)
    dk_b0, dk_b1 = warpgroup_mma_wait(0, deps=[pending_b0, pending_b1])
    return dk_a, dk_b0, dk_b1, dv


@gluon.jit
def finish(
    n, dk_a, HALF_ID: gl.constexpr, k_a, k_b, q_a, ds, dq_a_out, dq_b_out, dq_full, dq_empty,
    DA: gl.constexpr, DB: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """dQ and dk_a of the last tile, the n-th."""
    DQ_A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DA // 2, 16])
    DQ_B: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DB, 16])
    dq_a = gl.zeros((BM, DA // 2), gl.float32, DQ_A)
    dq_b = gl.zeros((BM, DB), gl.float32, DQ_B)
    dq_a, dq_b = start_queries(HALF_ID, 0, ds, k_a, k_b, dq_a, dq_b)
    dk_a = warpgroup_mma(ds.index(HALF_ID), q_a.index(n % STAGES), dk_a, is_async=True)
    dq_a, dq_b = warpgroup_mma_wait(1, deps=[dq_a, dq_b])
    mbarrier.wait(dq_empty, (n & 1) ^ 1)
    dq_a_out.index(HALF_ID).store(fragments(dq_a))
    dq_b_out.index(HALF_ID).store(fragments(dq_b))
    fence_async_shared()
    mbarrier.arrive(dq_full)
    return warpgroup_mma_wait(0, deps=[dk_a])


@gluon.jit
def store_rows(ptr, x, num_rows, stride):
    """A tile as the first rows of a matrix; ptr: of its first value."""
    row = gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, x.type.layout))
    column = gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, x.type.layout))
    at = ptr + row.to(gl.int64)[:, None] * stride + column[None, :]
    gl.store(at, x.to(ptr.dtype.element_ty), mask=(row < num_rows)[:, None])


@gluon.jit
def accumulate(
    HALF_ID: gl.constexpr, k_a, k_b, values, q_a, q_b, d_outs, lses, deltas, ds, dq_a_out, dq_b_out,
    kv_full, q_full, q_empty, d_full, d_empty, ds_full, ds_empty, dq_full, dq_empty,
    dk_ptr, dv_ptr, num_heads, first_key, num_keys, offset, start, full, stop, scale, log2_scale,
    DA: gl.constexpr, DB: gl.constexpr, V: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warpgroup: half of the keys; tiles from `full` on need no mask."""
    HALF: gl.constexpr = BN // 2
    D: gl.constexpr = DA + 2 * DB
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    DK_A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DA, 16])
    DK_B: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DB, 16])
    DV: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    first = first_key + HALF_ID * HALF
    key = first + gl.arange(0, HALF, layout=gl.SliceLayout(1, SCORES))
    dk_a = gl.zeros((HALF, DA), gl.float32, DK_A)
    dk_b0 = gl.zeros((HALF, DB), gl.float32, DK_B)
    dk_b1 = gl.zeros((HALF, DB), gl.float32, DK_B)
    dv = gl.zeros((HALF, V), gl.float32, DV)
    mbarrier.wait(kv_full.index(0), 0)
    dk_a, dk_b0, dk_b1, dv = step(
        start, 0, dk_a, dk_b0, dk_b1, dv, HALF_ID, k_a, k_b, values, q_a, q_b, d_outs, lses,
        deltas, ds, dq_a_out, dq_b_out, q_full, q_empty, d_full, d_empty, ds_full, ds_empty,
        dq_full, dq_empty, key, offset, log2_scale, DA, DB, V, BM, STAGES, True, True,
    )  # fmt: skip
    for i in range(start + 1, full):
        dk_a, dk_b0, dk_b1, dv = step(
            i, i - start, dk_a, dk_b0, dk_b1, dv, HALF_ID, k_a, k_b, values, q_a, q_b, d_outs, lses,
            deltas, ds, dq_a_out, dq_b_out, q_full, q_empty, d_full, d_empty, ds_full, ds_empty,
            dq_full, dq_empty, key, offset, log2_scale, DA, DB, V, BM, STAGES, False, True,
        )  # fmt: skip
    for i in range(gl.maximum(full, start + 1), stop):
        dk_a, dk_b0, dk_b1, dv = step(
            i, i - start, dk_a, dk_b0, dk_b1, dv, HALF_ID, k_a, k_b, values, q_a, q_b, d_outs, lses,
            deltas, ds, dq_a_out, dq_b_out, q_full, q_empty, d_full, d_empty, ds_full, ds_empty,
            dq_full, dq_empty, key, offset, log2_scale, DA, DB, V, BM, STAGES, False, False,
        )  # fmt: skip
    dk_a = finish(
        stop - 1 - start, dk_a, HALF_ID, k_a, k_b, q_a, ds, dq_a_out, dq_b_out, dq_full, dq_empty,
        DA, DB, BM, STAGES,
    )  # fmt: skip
    num_rows = num_keys - first
    row = HALF_ID * HALF * num_heads
    store_rows(dv_ptr + row * V, dv, num_rows, num_heads * V)
    dk_ptr += row * D
    store_rows(dk_ptr, dk_a * scale, num_rows, num_heads * D)
    store_rows(dk_ptr + DA, dk_b0 * scale, num_rows, num_heads * D)
    store_rows(dk_ptr + DA + DB, dk_b1 * scale, num_rows, num_heads * D)


@gluon.jit
def clear_gradients(ptr, num_rows, stride, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """Zeros in the first rows of a matrix."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    for column in gl.static_range(0, WIDTH, 64):
        store_rows(ptr + column, gl.zeros((ROWS, 64), gl.float32, LAYOUT), num_rows, stride)


@gluon.jit(do_not_specialize=SIZES)
def backward_kernel(
    k_a_desc, k_b_desc, v_desc, q_a_desc, q_b_desc, d_out_desc, lse_desc, delta_desc,
    dq_a_desc, dq_b_desc, table_ptr, dk_ptr, dv_ptr, ticket_ptr, count_ptr, num_key_tiles,
    num_padded, num_heads, q_stride_h, k_stride_h, v_stride_h,
    scale, log2_scale,
    DA: gl.constexpr, DB: gl.constexpr, V: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Grid: heads x tiles of keys. num_padded: P; count [H, P / BM] and the ticket begin at 0."""
    D: gl.constexpr = DA + 2 * DB
    HALF: gl.constexpr = BN // 2
    pid = gl.atomic_add(ticket_ptr, 1, sem="relaxed")
    head = pid // num_key_tiles
    tile = num_key_tiles - 1 - pid % num_key_tiles
    # Scalars, loaded one by one: a reduction's result would not be known to be uniform.
    table_ptr += tile * 6
    q_first = gl.load(table_ptr)
    num_queries = gl.load(table_ptr + 1)
    k_first = gl.load(table_ptr + 2)
    num_keys = gl.load(table_ptr + 3)
    key_tile = gl.load(table_ptr + 4)
    padded_row = gl.load(table_ptr + 5)
    if num_keys == 0:
        return
    first_key = key_tile * BN
    offset = num_keys - num_queries
    stop = gl.cdiv(num_queries, BM)
    start = gl.minimum(gl.maximum(first_key - offset, 0) // BM, stop)
    full = gl.cdiv(gl.maximum(first_key + BN - 1 - offset, 0), BM)
    full = gl.minimum(gl.maximum(full, start), stop)

    row = (k_first + first_key).to(gl.int64) * num_heads + head
    dk_at = dk_ptr + row * D
    dv_at = dv_ptr + row * V
    if start >= stop:
        clear_gradients(dk_at, num_keys - first_key, num_heads * D, BN, D)
        clear_gradients(dv_at, num_keys - first_key, num_heads * V, BN, V)
        return
    dtype: gl.constexpr = v_desc.dtype
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    k_a = gl.allocate_shared_memory(dtype, [2, HALF, DA], k_a_desc.layout)
    k_b = gl.allocate_shared_memory(dtype, [4, HALF, DB], k_b_desc.layout)
    values = gl.allocate_shared_memory(dtype, [2, HALF, V], v_desc.layout)
    q_a = gl.allocate_shared_memory(dtype, [STAGES, BM, DA], q_a_desc.layout)
    q_b = gl.allocate_shared_memory(dtype, [2 * STAGES, BM, DB], q_b_desc.layout)
    d_outs = gl.allocate_shared_memory(dtype, [STAGES, BM, V], d_out_desc.layout)
    lses = gl.allocate_shared_memory(gl.float32, [STAGES, BM], lse_desc.layout)
    deltas = gl.allocate_shared_memory(gl.float32, [STAGES, BM], delta_desc.layout)
    DS: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    ds = gl.allocate_shared_memory(dtype, [2, HALF, BM], DS)
    dq_a = gl.allocate_shared_memory(gl.float32, [2, DA // 8, 256], dq_a_desc.layout)
    dq_b = gl.allocate_shared_memory(gl.float32, [2, DB // 4, 256], dq_b_desc.layout)
    kv_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    d_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    d_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    ds_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    ds_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    dq_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    dq_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    mbarrier.init(q_full.index(STAGES), count=1)
    for i in gl.static_range(2):
        mbarrier.init(kv_full.index(i), count=1)
    mbarrier.init(ds_full, count=2)
    mbarrier.init(ds_empty, count=2)
    mbarrier.init(dq_full, count=2)
    mbarrier.init(dq_empty, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)
        mbarrier.init(d_full.index(i), count=1)
        mbarrier.init(d_empty.index(i), count=2)
    fence_async_shared()
    stat_at = head * num_padded + padded_row
    count_at = count_ptr + stat_at // BM
    gl.warp_specialize(
        [
            (accumulate, (
                0, k_a, k_b, values, q_a, q_b, d_outs, lses, deltas, ds, dq_a, dq_b,
                kv_full, q_full, q_empty, d_full, d_empty, ds_full, ds_empty, dq_full, dq_empty,
                dk_at, dv_at, num_heads, first_key, num_keys, offset, start, full, stop, scale,
                log2_scale, DA, DB, V, BM, BN, STAGES,
            )),
            (accumulate, (
                1, k_a, k_b, values, q_a, q_b, d_outs, lses, deltas, ds, dq_a, dq_b,
                kv_full, q_full, q_empty, d_full, d_empty, ds_full, ds_empty, dq_full, dq_empty,
                dk_at, dv_at, num_heads, first_key, num_keys, offset, start, full, stop, scale,
                log2_scale, DA, DB, V, BM, BN, STAGES,
            )),
            (load_tiles, (
                k_a, k_b, values, q_a, q_b, d_outs, lses, deltas, kv_full, q_full, q_empty, d_full,
                d_empty, k_a_desc, k_b_desc, v_desc, q_a_desc, q_b_desc, d_out_desc, lse_desc,
                delta_desc, k_first + first_key, q_first, padded_row, stat_at, head * k_stride_h,
                head * v_stride_h, head * q_stride_h, head * V, num_keys - first_key, num_queries,
                start, stop, D, DA, DB, V, BM, BN, STAGES,
            )),
            (add_tiles, (
                dq_a, dq_b, dq_full, dq_empty, dq_a_desc, dq_b_desc, count_at, stat_at, start, stop,
                offset, num_keys, key_tile, DA, DB, BM, BN,
            )),
        ],
        [4, 1, 1],
        [REGISTERS, 24, 24],
    )  # fmt: skip
