"""Everything of a KDA chunk that does not depend on the state, one program a chunk and head.

Report 1.2 and 1.4. With Kp = k e^G, Qp = q e^G (G from the chunk's start), X = (I + L)^-1 the
inverse of the unit lower triangle and Xb = X diag(beta), the chunk acts on a state S [V, K] by

    D^T = V^T Xb^T - S (Xb Kp)^T          writes of the delta rule
    o^T = V^T (P Xb)^T + S (Qp - P Xb Kp)^T
    S  <- S diag(e^G_end) + D^T (k e^{G_end - G})

so that the scan's output does not wait for D. This kernel stores -Xb Kp (`erase`),
Qp - P Xb Kp (`reads`), k e^{G_end - G} (`writes`), Xb (`solve`), P Xb (`mix`) and e^G_end
(`decay`), whole tiles with zeros where a sequence ends, so that the scan loads without masks.

Grams. Exponents are anchored to the middle of each 16-token tile (half its own total), where at
the bound of -5 a token they stay within +-40 nats, inside bfloat16 and float32. Tokens of
different tiles meet on doubling levels: the upper half of a block of tiles against its lower half,
both scaled to the boundary between them, so that no exponent is positive. Every level is one
full-width product (M = chunk, which the tensor cores of Hopper want at 64), and what it has no
business with is dropped by a select, never by a product with zero: it may be infinite.
Two exponentials a token and channel are taken; all other decays are these times a factor a tile.

Inverse: masked doubling, X <- X - X (L in the lower left b x b of each 2b x 2b) X, b = 1, 2, 4, ...
Each stage is an exact block inverse, without the cancellation of a Neumann series; entries of X
and L are at most 1, so half precision operands keep 10 bits (as tf32 does) at twice its rate.

On paper, H200, chunk 64, K = 128, per chunk and head: 48 KiB read, 64.5 KiB written; tensor cores
about 770 cycles for grams, 770 for the inverse, 380 for the rest; special functions 4 x 8192 / 16
= 2050 cycles. For T = 8192, H = 96 (93 chunks a multiprocessor) that is 0.31 ms of memory, 0.10 ms
of special functions and 0.10 ms of tensor cores, side by side when two programs share a
multiprocessor. Legend: K, V channels, BT chunk, BK = K rounded up to a power of two.
"""

import triton
import triton.language as tl


@triton.jit
def _dot(a, b, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    return tl.dot(a.to(OPERAND), b.to(OPERAND), input_precision=PRECISION)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp2(x * -1.4426950408889634))


@triton.jit
def _invert(
    lower, BT: tl.constexpr, NUM_STAGES: tl.constexpr, SOLVE: tl.constexpr, PRECISION: tl.constexpr
):
    """(I + lower)^-1 for a strictly lower triangular [BT, BT], by masked doubling."""
    i = tl.arange(0, BT)[:, None]
    j = tl.arange(0, BT)[None, :]
    is_first = ((i >> 1) == (j >> 1)) & (i > j)
    inverse = tl.where(i == j, 1.0, 0.0) - tl.where(is_first, lower, 0.0)
    for s in tl.static_range(1, NUM_STAGES):
        is_corner = ((i >> (s + 1)) == (j >> (s + 1))) & ((i >> s) > (j >> s))
        corner = tl.where(is_corner, lower, 0.0)
        left = _dot(inverse, corner, SOLVE, PRECISION)
        inverse -= _dot(left, inverse, SOLVE, PRECISION)
    return inverse


@triton.jit
def prep_kernel(
    q_ptr,
    k_ptr,
    gate_ptr,
    beta_ptr,
    A_log_ptr,
    dt_bias_ptr,
    chunk_ptr,
    erase_ptr,
    reads_ptr,
    writes_ptr,
    solve_ptr,
    mix_ptr,
    decay_ptr,
    num_heads,
    lower_bound,
    scale,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_gt,
    stride_gh,
    stride_bt,
    stride_bh,
    K: tl.constexpr,
    BK: tl.constexpr,
    BT: tl.constexpr,
    NUM_LEVELS: tl.constexpr,
    HAS_READS: tl.constexpr,
    OPERAND: tl.constexpr,
    GRAM: tl.constexpr,
    SOLVE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """chunk_ptr: int64 [chunks, 2], first token and number of tokens. Grid: chunks x heads."""
    NT: tl.constexpr = BT // 16
    pid = tl.program_id(0).to(tl.int64)
    head = pid % num_heads
    chunk = pid // num_heads
    first = tl.load(chunk_ptr + 2 * chunk)
    count = tl.load(chunk_ptr + 2 * chunk + 1)

    row = tl.arange(0, BT)
    channel = tl.arange(0, BK)
    is_row = row < count
    is_channel = channel < K
    is_in = is_row[:, None] & is_channel[None, :]
    token = first + row
    k = tl.load(
        k_ptr + token[:, None] * stride_kt + head * stride_kh + channel[None, :],
        mask=is_in,
        other=0.0,
    ).to(tl.float32)
    gate = tl.load(
        gate_ptr + token[:, None] * stride_gt + head * stride_gh + channel[None, :],
        mask=is_in,
        other=0.0,
    ).to(tl.float32)
    if HAS_READS:
        q = tl.load(
            q_ptr + token[:, None] * stride_qt + head * stride_qh + channel[None, :],
            mask=is_in,
            other=0.0,
        ).to(tl.float32)
        q *= tl.rsqrt(tl.sum(q * q, 1) + 1e-6)[:, None] * scale
    beta = tl.load(beta_ptr + token * stride_bt + head * stride_bh, mask=is_row, other=0.0)
    beta = tl.where(is_row, _sigmoid(beta.to(tl.float32)), 0.0)
    k *= tl.rsqrt(tl.sum(k * k, 1) + 1e-6)[:, None]
    rate = tl.exp2(tl.load(A_log_ptr + head).to(tl.float32) * 1.4426950408889634)
    bias = tl.load(dt_bias_ptr + head * K + channel, mask=is_channel, other=0.0).to(tl.float32)
    g = (lower_bound * 1.4426950408889634) * _sigmoid(rate * (gate + bias[None, :]))
    g = tl.where(is_row[:, None], g, 0.0)

    # Log2 decays inside tiles of 16 tokens, and the two exponentials that all others come from.
    g_tiles = tl.reshape(g, (NT, 16, BK))
    local = tl.cumsum(g_tiles, 1)
    tile_total = tl.sum(g_tiles, 1)
    half = 0.5 * tile_total
    up = tl.exp2(local - half[:, None, :])
    down = tl.exp2(half[:, None, :] - local)
    k_tiles = tl.reshape(k, (NT, 16, BK))
    k_up = k_tiles * up
    k_down = k_tiles * down

    i = row[:, None]
    j = row[None, :]
    k_rows = tl.reshape(k_up, (BT, BK)).to(GRAM)
    k_cols = tl.trans(tl.reshape(k_down, (BT, BK)).to(GRAM))
    gram = tl.dot(k_rows, k_cols, input_precision=PRECISION)
    if HAS_READS:
        q_tiles = tl.reshape(q, (NT, 16, BK))
        q_up = q_tiles * up
        q_rows = tl.reshape(q_up, (BT, BK)).to(GRAM)
        read_gram = tl.dot(q_rows, k_cols, input_precision=PRECISION)

    tile = tl.arange(0, NT)
    other_tile = tile[None, :, None]
    own_tile = tile[:, None, None]
    for level in tl.static_range(1, NUM_LEVELS + 1):
        # The boundary of each tile's block of 2^level tiles, and the decay between both.
        edge = ((own_tile >> level) << level) + (1 << (level - 1))
        is_between = ((other_tile >= edge) & (other_tile < own_tile)) | (
            (other_tile >= own_tile) & (other_tile < edge)
        )
        gap = tl.sum(tl.where(is_between, tile_total[None, :, :], 0.0), 1)
        is_upper = ((tile >> (level - 1)) & 1) == 1
        factor = tl.exp2(gap + tl.where(is_upper[:, None], half, -half))
        scaled = tl.where(is_upper[:, None, None], up, down) * factor[:, None, :]
        k_scaled = tl.reshape(k_tiles * scaled, (BT, BK)).to(GRAM)
        k_cols = tl.trans(k_scaled)
        is_pair = ((i >> (level + 4)) == (j >> (level + 4))) & (
            (i >> (level + 3)) > (j >> (level + 3))
        )
        gram = tl.where(
            is_pair, tl.dot(k_scaled, k_cols, input_precision=PRECISION), gram
        )
        if HAS_READS:
            q_scaled = tl.reshape(q_tiles * scaled, (BT, BK)).to(GRAM)
            read_gram = tl.where(
                is_pair, tl.dot(q_scaled, k_cols, input_precision=PRECISION), read_gram
            )

    lower = tl.where(i > j, gram * beta[:, None], 0.0)
    inverse = _invert(lower, BT, NUM_LEVELS + 4, SOLVE, PRECISION)
    solve = (inverse * beta[None, :]).to(OPERAND)

    before = tl.sum(tl.where(other_tile < own_tile, tile_total[None, :, :], 0.0), 1)
    total = tl.sum(tile_total, 0)
    from_start = tl.exp2(before + half)
    to_end = tl.exp2(total[None, :] - before - half)
    k_start = tl.reshape(k_up * from_start[:, None, :], (BT, BK)).to(OPERAND)
    k_end = tl.reshape(k_down * to_end[:, None, :], (BT, BK)).to(OPERAND)
    tile_offset = pid * (BT * BK) + i * BK + channel[None, :]
    pair_offset = pid * (BT * BT) + i * BT + j
    erase = tl.dot(solve, k_start, input_precision=PRECISION)
    tl.store(erase_ptr + tile_offset, (-erase).to(OPERAND))
    tl.store(writes_ptr + tile_offset, k_end)
    tl.store(solve_ptr + pair_offset, solve)
    tl.store(decay_ptr + pid * BK + channel, tl.exp2(total))
    if HAS_READS:
        read_gram = tl.where(i >= j, read_gram, 0.0).to(OPERAND)
        mix = tl.dot(read_gram, solve, input_precision=PRECISION).to(OPERAND)
        q_start = tl.reshape(q_up * from_start[:, None, :], (BT, BK))
        reads = q_start - tl.dot(mix, k_start, input_precision=PRECISION)
        tl.store(reads_ptr + tile_offset, reads.to(OPERAND))
        tl.store(mix_ptr + pair_offset, mix)
