"""Grouped products of a training call: padded rows and weights through tensor descriptors.

Rows times weights [E, N, K] as they lie (forward) or [E, K, N] (towards the inputs), and rows
times rows for the gradients of weights. A tile of BM rows reads on into the next expert's, whose
products are not stored; the weight gradients sum over whole tiles of BK rows, in which padding is
zero on both sides, so that nothing else can be there.

112 experts of 3584 -> 6144 -> 3584, 32,768 rows: forward 2.17 TFLOP, backward 4.33 and the
up-projection again 1.44: 7.9 TFLOP, 10.4 ms at 761 TFLOP/s. Bytes: weights read three times 22 GB
and gradients written 7.4 GB, 7 ms at 4.25 TB/s beside it. Padded to 64 rows 9% more products.

Legend: S padded rows, E experts, K inputs and N outputs of a product; BM rows, BN outputs, BK
inputs a step.
"""

import triton
import triton.language as tl

from k3_kernels.tl_math import situ


@triton.jit
def row_tile(tile_expert_ptr, tile_row_ptr, NUM_BLOCKS: tl.constexpr, GROUP: tl.constexpr):
    """(expert, first row, block of outputs) of a program; GROUP tiles share a block in time."""
    pid = tl.program_id(0)
    in_group = pid % (GROUP * NUM_BLOCKS)
    tile = pid // (GROUP * NUM_BLOCKS) * GROUP + in_group % GROUP
    expert = tl.load(tile_expert_ptr + tile)
    return expert, tl.load(tile_row_ptr + tile, mask=expert >= 0, other=0), in_group // GROUP


@triton.jit
def weight_tile(
    weights, expert, n, k, BN: tl.constexpr, BK: tl.constexpr, HAS_INPUTS_LAST: tl.constexpr
):
    """[BK, BN] of the weights [E, N, K] (HAS_INPUTS_LAST) or [E, K, N]; zeros outside."""
    if HAS_INPUTS_LAST:
        return weights.load([expert, n, k]).reshape((BN, BK)).T
    else:
        return weights.load([expert, k, n]).reshape((BK, BN))


@triton.jit
def product(
    acc, rows, weights, row, expert, n, num_inputs,
    BN: tl.constexpr, BK: tl.constexpr, HAS_INPUTS_LAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc [BM, BN] plus rows times weights. num_inputs is no constant: see `kernel.py`."""
    for k in range(0, num_inputs, BK):
        x = rows.load([row, k])
        w = weight_tile(weights, expert, n, k, BN, BK, HAS_INPUTS_LAST)
        acc = tl.dot(x, w, acc, input_precision=PRECISION)
    return acc


@triton.jit
def up_kernel(
    rows, first, second, tile_expert_ptr, tile_row_ptr, starts_ptr, out_ptr, up_ptr,
    beta, linear_beta, num_inputs,
    N: tl.constexpr, IS_GLU: tl.constexpr, HAS_CAP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """out = situ(first x, second x) of rows x [S, K] (IS_GLU), or out and up the two products."""
    NUM_BLOCKS: tl.constexpr = (N + BN - 1) // BN
    expert, row, block = row_tile(tile_expert_ptr, tile_row_ptr, NUM_BLOCKS, GROUP)
    if expert < 0:
        return
    n = block * BN
    gate = tl.zeros((BM, BN), tl.float32)
    up = tl.zeros((BM, BN), tl.float32)
    for k in range(0, num_inputs, BK):
        x = rows.load([row, k])
        gate = tl.dot(
            x, weight_tile(first, expert, n, k, BN, BK, True), gate, input_precision=PRECISION
        )
        up = tl.dot(
            x, weight_tile(second, expert, n, k, BN, BK, True), up, input_precision=PRECISION
        )
    r = (row + tl.arange(0, BM))[:, None]
    c = (n + tl.arange(0, BN))[None, :]
    mask = (r < tl.load(starts_ptr + expert + 1)) & (c < N)
    at = r.to(tl.int64) * N + c
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if IS_GLU:
        out = situ(gate, up, beta, linear_beta, HAS_CAP, dtype == tl.float32)
        tl.store(out_ptr + at, out.to(dtype), mask=mask)
    else:
        tl.store(out_ptr + at, gate.to(dtype), mask=mask)
        tl.store(up_ptr + at, up.to(dtype), mask=mask)


@triton.jit
def row_kernel(
    rows, weights, more_rows, more_weights, tile_expert_ptr, tile_row_ptr, starts_ptr, out_ptr,
    num_inputs,
    N: tl.constexpr, HAS_MORE: tl.constexpr, HAS_INPUTS_LAST: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """out [S, N] = rows times weights, plus those of a second pair (HAS_MORE)."""
    NUM_BLOCKS: tl.constexpr = (N + BN - 1) // BN
    expert, row, block = row_tile(tile_expert_ptr, tile_row_ptr, NUM_BLOCKS, GROUP)
    if expert < 0:
        return
    n = block * BN
    acc = tl.zeros((BM, BN), tl.float32)
    acc = product(
        acc, rows, weights, row, expert, n, num_inputs, BN, BK, HAS_INPUTS_LAST, PRECISION
    )
    if HAS_MORE:
        acc = product(
            acc, more_rows, more_weights, row, expert, n, num_inputs, BN, BK, HAS_INPUTS_LAST,
            PRECISION,
        )  # fmt: skip
    r = (row + tl.arange(0, BM))[:, None]
    c = (n + tl.arange(0, BN))[None, :]
    mask = (r < tl.load(starts_ptr + expert + 1)) & (c < N)
    tl.store(out_ptr + r.to(tl.int64) * N + c, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def weight_kernel(
    left, right, starts_ptr, out_ptr,
    M: tl.constexpr, N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out [E, M, N]: of each expert the sum over its rows of left^T right; zeros without rows."""
    BLOCKS_M: tl.constexpr = (M + BM - 1) // BM
    BLOCKS_N: tl.constexpr = (N + BN - 1) // BN
    expert = tl.program_id(0) // (BLOCKS_M * BLOCKS_N)
    block = tl.program_id(0) % (BLOCKS_M * BLOCKS_N)
    group = block // (GROUP * BLOCKS_N) * GROUP
    size = tl.minimum(BLOCKS_M - group, GROUP)
    m = (group + block % (GROUP * BLOCKS_N) % size) * BM
    n = block % (GROUP * BLOCKS_N) // size * BN
    acc = tl.zeros((BM, BN), tl.float32)
    for row in range(tl.load(starts_ptr + expert), tl.load(starts_ptr + expert + 1), BK):
        acc = tl.dot(left.load([row, m]).T, right.load([row, n]), acc, input_precision=PRECISION)
    i = (m + tl.arange(0, BM))[:, None]
    j = (n + tl.arange(0, BN))[None, :]
    at = (expert.to(tl.int64) * M + i) * N + j
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=(i < M) & (j < N))
