"""Grouped products of sorted rows with expert weights, plain or MXFP4 (report 4, 4.4).

The weight tile is the left operand, [BN outputs x BK inputs] times [BK x BM rows]: with few rows
an expert (decode) wgmma still gets its 64 rows from BN, and an unpacked MXFP4 tile goes to it from
registers. Word w (32 bits) of an MXFP4 row holds columns 8w .. 8w + 7; its nibbles i and i + 4
become the two halves of one register. Instead of bringing columns back in order, the activations
are kept in four parts (columns 8w + i and 8w + i + 4 of all w make part i), four products a step.
An up-projection writes its result in parts for the down-projection at no cost, by taking the
weight's rows in that order.

Unpacking costs about 4 instructions a weight (counted in the compiled loop), at 112 x (3584 ->
6144) 0.34 ms of issue slots on an H200; memory floors there are 0.31 ms in MXFP4 and 1.16 ms in
bfloat16.

Legend: R rows sorted by expert, E experts, N outputs, K inputs, T tokens, k routes a token.
"""

import triton
import triton.language as tl

from k3_kernels.early import wait_for_inputs
from k3_kernels.tl_math import normed, situ


@triton.jit
def nibble_pairs(
    words, SHIFT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, IS_BF16: tl.constexpr
):
    """Nibbles i and i + 4 of each word (SHIFT = 12 - 4 i) as 16-bit floats [BN, 2 BK].

    The sign goes to the top of each half, the other three bits to the end of the exponent and
    the start of the mantissa: 2^-126 (bfloat16) or 2^-14 (float16) times the value, subnormals
    included. Joined, the two halves of a register stay where they are.
    """
    shifted = words << SHIFT
    if IS_BF16:
        both = (shifted & -2147450880) | ((shifted >> 6) & 0x01C001C0)
        low = both.to(tl.int16).to(tl.bfloat16, bitcast=True)
        high = (both >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        both = (shifted & -2147450880) | ((shifted >> 3) & 0x0E000E00)
        low = both.to(tl.int16).to(tl.float16, bitcast=True)
        high = (both >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return tl.join(low, high).reshape((BN, 2 * BK))


@triton.jit
def block_factor(scale, IS_BF16: tl.constexpr):
    """2^(s - 127) of scale bytes in bfloat16, else 2^(s - 113) in float32."""
    if IS_BF16:
        # Byte 0 is the subnormal 2^-127, not zero.
        bits = tl.maximum(scale.to(tl.int32) << 7, 0x40)
        return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        # Exact up to byte 240, that is for weights below 2^113.
        return (tl.minimum(scale.to(tl.int32) + 14, 254) << 23).to(tl.float32, bitcast=True)


@triton.jit
def scaled(half, factor, DTYPE: tl.constexpr, IS_BF16: tl.constexpr):
    if IS_BF16:
        # Two exact products: one factor for both would overflow above byte 128.
        return (half * 8.507059173023462e37) * factor
    else:
        return (half.to(tl.float32) * factor).to(DTYPE)


@triton.jit
def mx_product(
    acc,
    packed_row,
    scale_row,
    is_out,
    x_row,
    is_row,
    start,
    K: tl.constexpr,
    BK: tl.constexpr,
    BN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """acc [BN, BM] plus BK words (8 BK columns) of packed weights times the four parts of x."""
    IS_BF16: tl.constexpr = x_row.dtype.element_ty == tl.bfloat16
    word = start + tl.arange(0, BK)
    g = start // 4 + tl.arange(0, BK // 4)
    is_word = word < K // 8 if (K // 8) % BK else tl.full((BK,), True, tl.int1)
    words = tl.load(packed_row + word[None, :], mask=is_out & is_word[None, :], other=0)
    # A scale past the row would be 255 = NaN in the worst case, and NaN * 0 stays NaN.
    is_scale = is_out & (g < K // 32)[None, :] if (K // 8) % BK else is_out
    scale = tl.load(scale_row + g[None, :], mask=is_scale, other=127)
    factor = block_factor(scale, IS_BF16)
    factor = tl.broadcast_to(factor[:, :, None], (BN, BK // 4, 8)).reshape((BN, 2 * BK))
    column = 2 * start + tl.arange(0, 2 * BK)
    is_in = column < K // 4 if (K // 8) % BK else tl.full((2 * BK,), True, tl.int1)
    for i in tl.static_range(4):
        halves = nibble_pairs(words, 12 - 4 * i, BN, BK, IS_BF16)
        x_at = x_row + i * (K // 4) + column[:, None]
        x = tl.load(x_at, mask=is_in[:, None] & is_row, other=0.0)
        acc = tl.dot(scaled(halves, factor, x.dtype, IS_BF16), x, acc, input_precision=PRECISION)
    return acc


@triton.jit
def plain_product(
    acc,
    w_row,
    is_out,
    x_row,
    is_row,
    start,
    K: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """acc [BN, BM] plus BK columns of weights times those of x."""
    c = start + tl.arange(0, BK)
    is_in = c < K if K % BK else tl.full((BK,), True, tl.int1)
    w = tl.load(w_row + c[None, :], mask=is_out & is_in[None, :], other=0.0)
    x = tl.load(x_row + c[:, None], mask=is_in[:, None] & is_row, other=0.0)
    return tl.dot(w.to(x.dtype), x, acc, input_precision=PRECISION)


@triton.jit
def tile_product(
    x_row,
    is_row,
    out_at,
    expert,
    block,
    w_ptr,
    w_scale_ptr,
    up_ptr,
    up_scale_ptr,
    beta,
    linear_beta,
    num_inputs,
    N: tl.constexpr,
    K: tl.constexpr,
    IS_MX: tl.constexpr,
    IS_GLU: tl.constexpr,
    HAS_CAP: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A block of outputs of one expert for BM rows, whose inputs and outputs begin at x_row and
    out_at [1, BM]. `expert` is int64; the constants are those of `grouped_kernel`."""
    j = tl.arange(0, BN)
    if IS_SPLIT:
        part, at = j // (BN // 4), j % (BN // 4)
        n = block * BN + 8 * (at // 2) + part + 4 * (at % 2)
        column = part * (N // 4) + block * (BN // 4) + at
    else:
        n = block * BN + j
        column = n
    # Without a remainder the masks are constant, which keeps the accesses wide.
    is_out = (n < N if N % BN else tl.full((BN,), True, tl.int1))[:, None]
    w_at = expert * N + n[:, None]
    acc = tl.zeros((BN, BM), tl.float32)
    up = tl.zeros((BN, BM), tl.float32)
    if IS_MX:
        w_row, w_scale = w_ptr + w_at * (K // 8), w_scale_ptr + w_at * (K // 32)
        up_row, up_scale = up_ptr + w_at * (K // 8), up_scale_ptr + w_at * (K // 32)
        for start in range(0, num_inputs // 8, BK):
            acc = mx_product(
                acc, w_row, w_scale, is_out, x_row, is_row, start, K, BK, BN, PRECISION
            )
            if IS_GLU:
                up = mx_product(
                    up, up_row, up_scale, is_out, x_row, is_row, start, K, BK, BN, PRECISION
                )
    else:
        w_row, up_row = w_ptr + w_at * K, up_ptr + w_at * K
        for start in range(0, num_inputs, BK):
            acc = plain_product(acc, w_row, is_out, x_row, is_row, start, K, BK, PRECISION)
            if IS_GLU:
                up = plain_product(up, up_row, is_out, x_row, is_row, start, K, BK, PRECISION)
    DTYPE: tl.constexpr = out_at.dtype.element_ty
    if IS_GLU:
        acc = situ(acc, up, beta, linear_beta, HAS_CAP, tl.float32 == DTYPE)
    tl.store(out_at + column[:, None], acc.to(DTYPE), mask=is_out & is_row)


@triton.jit
def grouped_kernel(
    x_ptr,
    order_ptr,
    starts_ptr,
    tile_expert_ptr,
    tile_row_ptr,
    w_ptr,
    w_scale_ptr,
    up_ptr,
    up_scale_ptr,
    out_ptr,
    beta,
    linear_beta,
    num_rows,
    num_inputs,
    NUM_ROUTES: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    IS_MX: tl.constexpr,
    IS_GLU: tl.constexpr,
    HAS_CAP: tl.constexpr,
    IS_GATHER: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """out[row] = W_e x[row]; with IS_GLU situ(W_e x, U_e x).

    IS_GATHER: x is [T, K] and a row reads token order[row] // k, out is [R, N] in sorted order;
    else x is [R, K] in sorted order and out is written at order[row], the route. IS_SPLIT: outputs
    in four parts, N being a multiple of 8.

    num_inputs is K, as a number that the compiler does not know: ptxas (of Triton 3.6) unrolls a
    loop of four steps whole and then gets two asynchronous products in three stages wrong.
    """
    wait_for_inputs(IS_EARLY)
    num_blocks: tl.constexpr = (N + BN - 1) // BN
    pid = tl.program_id(0)
    in_group = pid % (GROUP * num_blocks)
    tile = pid // (GROUP * num_blocks) * GROUP + in_group % GROUP
    block = in_group // GROUP
    expert = tl.load(tile_expert_ptr + tile).to(tl.int64)
    if expert < 0:
        return
    row = tl.load(tile_row_ptr + tile) + tl.arange(0, BM)
    is_row = (row < tl.load(starts_ptr + expert + 1))[None, :]
    # Not masked by the expert's end, whose load it would wait for; a row past it is not used.
    route = tl.load(order_ptr + row[None, :], mask=row[None, :] < num_rows, other=0).to(tl.int64)
    row = row[None, :].to(tl.int64)
    tile_product(
        x_ptr + (route // NUM_ROUTES if IS_GATHER else row) * K,
        is_row,
        out_ptr + (row if IS_GATHER else route) * N,
        expert,
        block,
        w_ptr,
        w_scale_ptr,
        up_ptr,
        up_scale_ptr,
        beta,
        linear_beta,
        num_inputs,
        N,
        K,
        IS_MX,
        IS_GLU,
        HAS_CAP,
        IS_SPLIT,
        BM,
        BN,
        BK,
        PRECISION,
    )


@triton.jit
def unplanned_kernel(
    x_ptr,
    idx_ptr,
    w_ptr,
    w_scale_ptr,
    up_ptr,
    up_scale_ptr,
    out_ptr,
    beta,
    linear_beta,
    num_rows,
    num_inputs,
    num_experts,
    NUM_ROUTES: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    IS_MX: tl.constexpr,
    IS_GLU: tl.constexpr,
    HAS_CAP: tl.constexpr,
    IS_GATHER: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    RPAD: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """`grouped_kernel` for so few rows that each program finds its own among all, without a plan.

    A program belongs to a route. If a multiple of BM routes of its expert come before it, it
    computes for BM of them from its own on, else it is done. x is [T, K] (IS_GATHER) or [R, K], out
    [R, N], both in the order of the routes.
    """
    wait_for_inputs(IS_EARLY)
    num_blocks: tl.constexpr = (N + BN - 1) // BN
    own = tl.program_id(0) // num_blocks
    block = tl.program_id(0) % num_blocks
    expert = tl.load(idx_ptr + own)
    r = tl.arange(0, RPAD)
    is_same = tl.load(idx_ptr + r, mask=r < num_rows, other=-1) == expert
    rank = tl.sum((is_same & (r < own)).to(tl.int32))
    if (expert < 0) | (expert >= num_experts) | (rank % BM != 0):
        return
    count = tl.minimum(tl.sum(is_same.to(tl.int32)) - rank, BM)
    candidate = tl.where(is_same, r, RPAD)
    i = tl.arange(0, BM)
    route = tl.zeros((BM,), tl.int32)
    last = own - 1
    # An expert has few: one after the other takes fewer registers than all at once.
    for k in range(count):
        last = tl.min(tl.where(candidate > last, candidate, RPAD))
        route = tl.where(i == k, last, route)
    route = route[None, :].to(tl.int64)
    tile_product(
        x_ptr + (route // NUM_ROUTES if IS_GATHER else route) * K,
        (i < count)[None, :],
        out_ptr + route * N,
        expert,
        block,
        w_ptr,
        w_scale_ptr,
        up_ptr,
        up_scale_ptr,
        beta,
        linear_beta,
        num_inputs,
        N,
        K,
        IS_MX,
        IS_GLU,
        HAS_CAP,
        IS_SPLIT,
        BM,
        BN,
        BK,
        PRECISION,
    )


@triton.jit
def combine_kernel(
    y_ptr,
    place_ptr,
    weight_ptr,
    norm_ptr,
    out_ptr,
    eps,
    num_places,
    NUM_ROUTES: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    IS_SORTED: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """out[t] = sum_k weight[t, k] y[t k], in float32 and in the order of the routes.

    place [T, k]: the id of the expert, or the row of y (IS_SORTED). A route whose place is outside
    0..num_places - 1 adds nothing: its row was never written. HAS_NORM: its RMSNorm, for which a
    block is a row.
    """
    if HAS_NORM:
        norm = tl.load(norm_ptr + tl.arange(0, BD), mask=tl.arange(0, BD) < D, other=0.0)
    wait_for_inputs(IS_EARLY)
    num_blocks = tl.cdiv(D, BD)
    token = (tl.program_id(0) // num_blocks).to(tl.int64)
    d = (tl.program_id(0) % num_blocks) * BD + tl.arange(0, BD)
    acc = tl.zeros((BD,), tl.float32)
    for k in tl.static_range(NUM_ROUTES):
        route = token * NUM_ROUTES + k
        place = tl.load(place_ptr + route)
        is_known = (place >= 0) & (place < num_places)
        row = place.to(tl.int64) if IS_SORTED else route
        # The row of a route is loaded all the same: a mask would wait for its place.
        is_read = (d < D) & is_known if IS_SORTED else d < D
        y = tl.load(y_ptr + row * D + d, mask=is_read, other=0.0)
        y = tl.where(is_known, y.to(tl.float32), 0.0)
        if HAS_WEIGHT:
            y *= tl.where(is_known, tl.load(weight_ptr + route).to(tl.float32), 0.0)
        acc += y
    out = acc.to(out_ptr.dtype.element_ty)
    if HAS_NORM:
        out = normed(out, norm, eps, D)
    tl.store(out_ptr + token * D + d, out, mask=d < D)
