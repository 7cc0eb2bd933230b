"""Everything of a KDA chunk that does not depend on the state, one program a chunk and head.

Report 1.2 and 1.4. With Kp = k e^G, Qp = q e^G (G from the chunk's start), X = (I + L)^-1 the
inverse of the unit lower triangle, Xb = X diag(beta) and P the read gram, the chunk acts on a
state S [V, K] by

    D^T = V^T Xb^T - S (Xb Kp)^T          writes of the delta rule
    o^T = V^T (P Xb)^T + S (Qp - P Xb Kp)^T
    S  <- S diag(e^G_end) + D^T (k e^{G_end - G})

so that the scan's output does not wait for D. This kernel stores -Xb Kp (`erase`),
Qp - P Xb Kp (`reads`), k e^{G_end - G} (`writes`), Xb (`solve`), P Xb (`mix`) and e^G_end
(`decay`), whole tiles with zeros where a sequence ends, so that the scan loads without masks.
`writes` is made of k as it came; the norm that it lacks is in the rows of `solve` and `erase`.

Exponents. All are sums of log decays over some tokens of the chunk, that is constant matrices of
0, 1 and +-1/2 (plan.decay_sums) times g: products on the tensor cores, in whose layout the
operands are then made, instead of scans across warps. In bfloat16 g goes in as two parts, exact to
2^-17 of itself. Anchors: inside a tile of 16 or 32 tokens its middle, where at the bound of -5 a
token 32 tokens stay within +-80 nats, inside bfloat16 and float32; between the two tiles of a
chunk the edge, where no exponent is positive. Both grams are full-width products (M = chunk, which
the tensor cores of Hopper want at 64), and the entries that the anchor does not fit are dropped
by a select, never by a product with zero: they may be infinite.

Inverse: masked doubling, X <- X - X (L in the lower left b x b of each 2b x 2b) X, b = 1, 2, 4, ...
Each stage is an exact block inverse, without the cancellation of a Neumann series; entries of X
and L are at most 1, so half precision operands keep 10 bits (as tf32 does) at twice its rate.

On paper, H200, chunk 64, K = 128, bfloat16: 48 KiB read and 64.5 KiB written a chunk and head
(the detour of Kp and Qp through `erase` and `reads` stays in the L2), 0.33 ms for T = 8192, H = 96.
Compiled for sm_90 by triton 3.6 a warp issues about 7,500 instructions: with 93 programs of 4
warps a multiprocessor 0.40 ms at one a cycle and scheduler. So it is bound by instruction issue
as much as by memory: expect 0.5 to 0.65 ms, and look for instructions first.
Legend: K, V channels, BT chunk, BK = K rounded up to a power of two, BC a block of its channels.
"""

import triton
import triton.language as tl


@triton.jit
def _invert(lower, BT: tl.constexpr, SOLVE: tl.constexpr, PRECISION: tl.constexpr):
    """(I + lower)^-1 for a strictly lower triangular [BT, BT], by masked doubling."""
    i = tl.arange(0, BT)[:, None]
    j = tl.arange(0, BT)[None, :]
    is_corner = ((i // 2) == (j // 2)) & (i > j)
    inverse = tl.where(i == j, 1.0, 0.0) - tl.where(is_corner, lower, 0.0)
    for s in tl.static_range(1, 6):
        if (1 << s) < BT:
            is_corner = ((i >> (s + 1)) == (j >> (s + 1))) & ((i >> s) > (j >> s))
            corner = tl.where(is_corner, lower, 0.0).to(SOLVE)
            known = inverse.to(SOLVE)
            left = tl.dot(known, corner, input_precision=PRECISION).to(SOLVE)
            inverse -= tl.dot(left, known, input_precision=PRECISION)
    return inverse


@triton.jit
def _decays(sums, g_high, g_low, IS_SPLIT: tl.constexpr, SUM_PRECISION: tl.constexpr):
    """sums @ g for g in two parts, or all of it in the first when float32."""
    exponents = tl.dot(sums, g_high, input_precision=SUM_PRECISION)
    if IS_SPLIT:
        exponents = tl.dot(sums, g_low, acc=exponents, input_precision=SUM_PRECISION)
    return exponents


@triton.jit
def prep_kernel(
    q_ptr,
    k_ptr,
    gate_ptr,
    beta_ptr,
    A_log_ptr,
    dt_bias_ptr,
    chunk_ptr,
    sums_ptr,
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
    BC: tl.constexpr,
    BT: tl.constexpr,
    TILE: tl.constexpr,
    HAS_READS: tl.constexpr,
    OPERAND: tl.constexpr,
    GRAM: tl.constexpr,
    SOLVE: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
    SUM_PRECISION: tl.constexpr,
):
    """chunk_ptr: int64 [chunks, 2], first token and number of tokens. Grid: chunks x heads."""
    pid = tl.program_id(0).to(tl.int64)
    head = pid % num_heads
    chunk = pid // num_heads
    first = tl.load(chunk_ptr + 2 * chunk)
    count = tl.load(chunk_ptr + 2 * chunk + 1)
    row = tl.arange(0, BT)
    is_row = row < count
    i = row[:, None]
    j = row[None, :]
    # sigmoid(x) |bound| = 1 / (c + c 2^(-x log2 e)), taken as the square of one rsqrt: a division
    # costs eight instructions. The rate is kept from 0, so that a raw gate of -inf (rows beyond the
    # end) gives no decay.
    rate = tl.exp2(tl.load(A_log_ptr + head).to(tl.float32) * 1.4426950408889634)
    rate = -1.4426950408889634 * tl.maximum(rate, 1e-30)
    inverse_bound = -1.0 / (lower_bound * 1.4426950408889634)
    beta = tl.load(
        beta_ptr + first * stride_bt + head * stride_bh + row * stride_bt, mask=is_row, other=0.0
    )
    beta = tl.where(is_row, 1.0 / (1.0 + tl.exp2(beta.to(tl.float32) * -1.4426950408889634)), 0.0)
    q_ptr += first * stride_qt + head * stride_qh
    k_ptr += first * stride_kt + head * stride_kh
    gate_ptr += first * stride_gt + head * stride_gh
    dt_bias_ptr += head * K
    tile_start = pid * (BT * BK)
    pair_start = pid * (BT * BT)
    decay_ptr += pid * BK

    near = tl.zeros((BT, BT), dtype=tl.float32)
    far = tl.zeros((BT, BT), dtype=tl.float32)
    read_near = tl.zeros((BT, BT), dtype=tl.float32)
    read_far = tl.zeros((BT, BT), dtype=tl.float32)
    k_square = tl.zeros((BT,), dtype=tl.float32)
    q_square = tl.zeros((BT,), dtype=tl.float32)
    is_same = (i // TILE) == (j // TILE)
    sum_offset = i * BT + j
    to_middle = tl.load(sums_ptr + sum_offset)
    from_start = tl.load(sums_ptr + BT * BT + sum_offset)
    to_end = tl.load(sums_ptr + 2 * BT * BT + sum_offset)
    if BT > TILE:
        to_edge = tl.load(sums_ptr + 3 * BT * BT + sum_offset)
    for block in range(0, BK, BC):
        channel = block + tl.arange(0, BC)
        is_channel = channel < K
        is_in = is_row[:, None] & is_channel[None, :]
        gate = tl.load(gate_ptr + i * stride_gt + channel[None, :], mask=is_in, other=float("-inf"))
        bias = tl.load(dt_bias_ptr + channel, mask=is_channel, other=0.0).to(tl.float32)
        g = tl.exp2((gate.to(tl.float32) + bias[None, :]) * rate)
        root = tl.rsqrt(inverse_bound + inverse_bound * g)
        g = -root * root
        g_high = g.to(GRAM)
        g_low = (g - g_high.to(tl.float32)).to(GRAM)

        # Keys: to the chunk's start and end, then grams inside tiles and across their edge.
        k = tl.load(k_ptr + i * stride_kt + channel[None, :], mask=is_in, other=0.0)
        k = k.to(tl.float32)
        k_square += tl.sum(k * k, 1)
        offset = tile_start + i * BK + channel[None, :]
        end = tl.exp2(_decays(to_end, g_high, g_low, IS_SPLIT, SUM_PRECISION))
        tl.store(writes_ptr + offset, (k * end).to(OPERAND))
        tl.store(decay_ptr + channel, tl.exp2(tl.sum(g, 0)))
        start = tl.exp2(_decays(from_start, g_high, g_low, IS_SPLIT, SUM_PRECISION))
        tl.store(erase_ptr + offset, (k * start).to(OPERAND))
        if HAS_READS:
            q = tl.load(q_ptr + i * stride_qt + channel[None, :], mask=is_in, other=0.0)
            q = q.to(tl.float32)
            q_square += tl.sum(q * q, 1)
            tl.store(reads_ptr + offset, (q * start).to(OPERAND))
        middle = _decays(to_middle, g_high, g_low, IS_SPLIT, SUM_PRECISION)
        up = tl.exp2(middle)
        k_cols = tl.trans((k * tl.exp2(-middle)).to(GRAM))
        near = tl.dot((k * up).to(GRAM), k_cols, acc=near, input_precision=PRECISION)
        if HAS_READS:
            read_near = tl.dot((q * up).to(GRAM), k_cols, acc=read_near, input_precision=PRECISION)
        if BT > TILE:
            edge = tl.exp2(_decays(to_edge, g_high, g_low, IS_SPLIT, SUM_PRECISION))
            k_edge = (k * edge).to(GRAM)
            far = tl.dot(k_edge, tl.trans(k_edge), acc=far, input_precision=PRECISION)
            if HAS_READS:
                q_edge = (q * edge).to(GRAM)
                read_far = tl.dot(q_edge, tl.trans(k_edge), acc=read_far, input_precision=PRECISION)

    gram = tl.where(is_same, near, far)
    read_gram = tl.where(is_same, read_near, read_far)
    k_norm = tl.rsqrt(k_square + 1e-6)
    lower = tl.where(i > j, gram * (beta * k_norm)[:, None] * k_norm[None, :], 0.0)
    inverse = _invert(lower, BT, SOLVE, PRECISION)
    solve = inverse * beta[None, :]
    pair_offset = pair_start + i * BT + j
    # k is stored as it came: its norm is on both sides of the inverse.
    erase_solve = (solve * -k_norm[:, None] * k_norm[None, :]).to(OPERAND)
    tl.store(solve_ptr + pair_offset, (solve * k_norm[:, None]).to(OPERAND))
    if HAS_READS:
        q_norm = tl.rsqrt(q_square + 1e-6) * scale
        read_gram = tl.where(i >= j, read_gram * q_norm[:, None] * k_norm[None, :], 0.0)
        mix = tl.dot(read_gram.to(OPERAND), solve.to(OPERAND), input_precision=PRECISION)
        tl.store(mix_ptr + pair_offset, mix.to(OPERAND))
        mix_k = (mix * -k_norm[None, :]).to(OPERAND)
    tl.debug_barrier()
    for block in range(0, BK, BC):
        offset = tile_start + i * BK + (block + tl.arange(0, BC))[None, :]
        k_start = tl.load(erase_ptr + offset)
        erase = tl.dot(erase_solve, k_start, input_precision=PRECISION)
        if HAS_READS:
            q_start = tl.load(reads_ptr + offset).to(tl.float32) * q_norm[:, None]
            reads = tl.dot(mix_k, k_start, acc=q_start, input_precision=PRECISION)
        tl.debug_barrier()
        tl.store(erase_ptr + offset, erase.to(OPERAND))
        if HAS_READS:
            tl.store(reads_ptr + offset, reads.to(OPERAND))
