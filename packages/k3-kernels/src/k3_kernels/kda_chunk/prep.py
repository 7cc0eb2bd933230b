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
    BC: tl.constexpr,
    BT: tl.constexpr,
    TILE: tl.constexpr,
    HAS_READS: tl.constexpr,
    OPERAND: tl.constexpr,
    GRAM: tl.constexpr,
    SOLVE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """chunk_ptr: int64 [chunks, 2], first token and number of tokens. Grid: chunks x heads."""
    NT: tl.constexpr = BT // TILE
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

    gram = tl.zeros((BT, BT), dtype=tl.float32)
    read_gram = tl.zeros((BT, BT), dtype=tl.float32)
    k_square = tl.zeros((BT,), dtype=tl.float32)
    q_square = tl.zeros((BT,), dtype=tl.float32)
    is_same = (i // TILE) == (j // TILE)
    for block in range(0, BK, BC):
        channel = block + tl.arange(0, BC)
        is_channel = channel < K
        is_in = is_row[:, None] & is_channel[None, :]
        gate = tl.load(
            gate_ptr + i * stride_gt + channel[None, :], mask=is_in, other=float("-inf")
        )
        k = tl.load(k_ptr + i * stride_kt + channel[None, :], mask=is_in, other=0.0)
        k = k.to(tl.float32)
        k_square += tl.sum(k * k, 1)
        bias = tl.load(dt_bias_ptr + channel, mask=is_channel, other=0.0).to(tl.float32)
        g = tl.exp2((gate.to(tl.float32) + bias[None, :]) * rate)
        root = tl.rsqrt(inverse_bound + inverse_bound * g)
        g = tl.reshape(-root * root, (NT, TILE, BC))

        # Log2 decay from the tile's start, less half of the tile's total; both exponentials.
        total = tl.sum(g, 1)
        half = 0.5 * total
        local = tl.cumsum(g, 1) - half[:, None, :]
        up = tl.exp2(local)
        down = tl.exp2(-local)
        k_tiles = tl.reshape(k, (NT, TILE, BC))
        k_up = k_tiles * up
        k_down = k_tiles * down
        k_rows = tl.reshape(k_up, (BT, BC)).to(GRAM)
        k_cols = tl.trans(tl.reshape(k_down, (BT, BC)).to(GRAM))
        near = tl.dot(k_rows, k_cols, input_precision=PRECISION)
        gram += tl.where(is_same, near, 0.0)
        # Factors that move the anchor to the chunk's start and end, and for keys and queries of
        # different tiles to the edge between them (zero for the tiles that take no such part).
        edge = tl.exp2(half)
        total_chunk = tl.sum(total, 0)
        if NT == 2:
            is_first = (tl.arange(0, 2) == 0)[:, None]
            across = tl.exp2(total_chunk[None, :] - total)
            to_start = tl.where(is_first, edge, edge * across)[:, None, :]
            to_end = tl.where(is_first, edge * across, edge)[:, None, :]
            early = tl.where(is_first, edge, 0.0)[:, None, :]
            late = tl.where(is_first, 0.0, edge)[:, None, :]
            k_far = tl.trans(tl.reshape(k_down * early, (BT, BC)).to(GRAM))
            k_late = tl.reshape(k_up * late, (BT, BC)).to(GRAM)
            gram = tl.dot(k_late, k_far, acc=gram, input_precision=PRECISION)
        else:
            to_start = edge[:, None, :]
            to_end = edge[:, None, :]
        if HAS_READS:
            q = tl.load(q_ptr + i * stride_qt + channel[None, :], mask=is_in, other=0.0)
            q = q.to(tl.float32)
            q_square += tl.sum(q * q, 1)
            q_up = tl.reshape(q, (NT, TILE, BC)) * up
            q_rows = tl.reshape(q_up, (BT, BC)).to(GRAM)
            near = tl.dot(q_rows, k_cols, input_precision=PRECISION)
            read_gram += tl.where(is_same, near, 0.0)
            if NT == 2:
                q_late = tl.reshape(q_up * late, (BT, BC)).to(GRAM)
                read_gram = tl.dot(q_late, k_far, acc=read_gram, input_precision=PRECISION)
        offset = tile_start + i * BK + channel[None, :]
        tl.store(erase_ptr + offset, tl.reshape(k_up * to_start, (BT, BC)).to(OPERAND))
        tl.store(writes_ptr + offset, tl.reshape(k_down * to_end, (BT, BC)).to(OPERAND))
        tl.store(decay_ptr + channel, tl.exp2(total_chunk))
        if HAS_READS:
            tl.store(reads_ptr + offset, tl.reshape(q_up * to_start, (BT, BC)).to(OPERAND))

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
