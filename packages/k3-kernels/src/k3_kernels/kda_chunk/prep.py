"""Everything of a KDA chunk that does not depend on the state, one program a chunk and head.

Report 1.2 and 1.4. With G the log decays summed from the chunk's start, T their total, and every
exponent counted from the chunk's middle, T / 2, this kernel stores, one after another, the tiles

    erase  = k e^(G - T/2)            what the state is erased along       [chunk, K]
    writes = k e^(T/2 - G)            what is written to the state         [chunk, K]
    solve  = (I + L)^-1 diag(beta)    the delta rule inside the chunk      [chunk, chunk]
    reads  = q e^(G - T/2)            what is read from it                 [chunk, K]
    mix    = q with k, causal         reads of the chunk's own writes      [chunk, chunk]

and in float32, since they multiply sums,

    half   = e^(T/2)                  from an end of the chunk to its middle          [K]
    norms  = -1 / |k|, scale / |q|                                         [2, chunk]
    bound  = log2 of a bound of how much of a state is left after the chunk (with HAS_BOUND)

with keys and queries as they came: their norms are in `solve` (rows, one side of the products with
`writes`) and `norms`. Tiles are whole, and rows beyond the end of a sequence have beta 0, so that
the scan loads without masks.

Exponents. G - T/2 is half of the log decays up to a token less half of those after it: one product
of a constant matrix with the log decays, on the tensor cores, whose layout the operands are then
made in. At the bound of -5 a token it stays within +-80 nats for 32 tokens, inside the range of
bfloat16 and float32; the products of a token with a later one can overflow and are dropped by a
select, never by a product with zero. 16-bit operands take log decays in float16: 2^-12 of each.

Inverse: masked doubling, X <- X - X (L in the lower left b x b of each 2b x 2b) X, b = 1, 2, 4, ...
Each stage is an exact block inverse, without the cancellation of a Neumann series; entries of X
and L are at most 1, so half precision operands keep 10 bits (as tf32 does) at twice its rate.

Bound: a token multiplies the state by diag(e^g) (I - beta k k^T), whose norm is at most the largest
e^g of its channels, since beta and |k| are at most 1; a chunk by at most the product of these.

The norm of a key is the diagonal of the gram matrix, where the decays cancel.
Legend: K channels, BT chunk, BK = K rounded up to a power of two, BC a block of its channels.
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
    lower = lower.to(SOLVE)
    for s in tl.static_range(1, 5):
        if (1 << s) < BT:
            is_corner = ((i >> (s + 1)) == (j >> (s + 1))) & ((i >> s) > (j >> s))
            corner = tl.where(is_corner, lower, 0.0)
            known = inverse.to(SOLVE)
            left = tl.dot(known, corner, input_precision=PRECISION) * -1.0
            inverse = tl.dot(left.to(SOLVE), known, acc=inverse, input_precision=PRECISION)
    return inverse


@triton.jit
def log_decay(gate, bias, rate, inverse_bound):
    """-log2 of the decay of a token and channel: |bound| log2(e) sigmoid(-rate (gate + bias)).

    sigmoid(x) |bound| = 1 / (c + c 2^(-x log2 e)), taken as the square of one rsqrt: a division
    costs eight instructions.
    """
    g = tl.exp2((gate + bias) * rate)
    root = tl.rsqrt(inverse_bound + inverse_bound * g)
    return root * root


@triton.jit
def load_masked(pointer, offset, mask, IS_MASKED: tl.constexpr):
    """A tile; channels beyond K are zero. Without a mask nothing has to be merged in registers."""
    if IS_MASKED:
        return tl.load(pointer + offset, mask=mask, other=0.0)
    return tl.load(pointer + offset)


@triton.jit
def prep_kernel(
    q_ptr,
    k_ptr,
    gate_ptr,
    beta_ptr,
    A_log_ptr,
    dt_bias_ptr,
    chunk_ptr,
    tile_ptr,
    vector_ptr,
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
    GROUP: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    BC: tl.constexpr,
    BT: tl.constexpr,
    TILES: tl.constexpr,
    VECTORS: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_READS: tl.constexpr,
    HAS_BOUND: tl.constexpr,
    OPERAND: tl.constexpr,
    SUMS: tl.constexpr,
    SOLVE: tl.constexpr,
    PRECISION: tl.constexpr,
    SUM_PRECISION: tl.constexpr,
):
    """chunk_ptr: int64 [chunks, 4], first token, number of tokens, (for the scan). tile_ptr,
    vector_ptr: [chunks, heads, TILES or VECTORS]. Value heads share the queries and keys of one
    head in GROUP. Grid: chunks x value heads."""
    pid = tl.program_id(0).to(tl.int64)
    head = pid % num_heads
    chunk = pid // num_heads
    first = tl.load(chunk_ptr + 4 * chunk)
    count = tl.load(chunk_ptr + 4 * chunk + 1).to(tl.int32)
    row = tl.arange(0, BT)
    is_row = row < count
    i = row[:, None]
    j = row[None, :]
    # The rate is kept from 0, so that a raw gate of -inf gives no decay.
    rate = tl.exp2(tl.load(A_log_ptr + head).to(tl.float32) * 1.4426950408889634)
    rate = -1.4426950408889634 * tl.maximum(rate, 1e-30)
    inverse_bound = -1.0 / (lower_bound * 1.4426950408889634)

    # Rows beyond the end read the last token: without decay (to_middle) and beta, they do nothing.
    token = first + tl.minimum(row, count - 1)[:, None]
    q_ptr += token * stride_qt + (head // GROUP) * stride_qh
    k_ptr += token * stride_kt + (head // GROUP) * stride_kh
    gate_ptr += token * stride_gt + head * stride_gh
    dt_bias_ptr += head * K
    erase_ptr = tile_ptr + pid * TILES
    writes_ptr = erase_ptr + BT * BK
    solve_ptr = writes_ptr + BT * BK
    reads_ptr = solve_ptr + BT * BT
    mix_ptr = reads_ptr + BT * BK
    half_ptr = vector_ptr + pid * VECTORS
    norm_ptr = half_ptr + BK
    lane = tl.arange(0, BC)[None, :]
    tile = i * BK + lane

    gram = tl.zeros((BT, BT), dtype=tl.float32)
    mix = tl.zeros((BT, BT), dtype=tl.float32)
    q_square = tl.zeros((BT,), dtype=tl.float32)
    least = tl.full((BT, BC), 1e30, tl.float32)
    # The log decays go in without their sign.
    to_middle = tl.where(j < count, tl.where(i >= j, -0.5, 0.5), 0.0).to(SUMS)
    for block in tl.range(0, BK, BC, num_stages=STAGES):
        channel = block + lane
        is_in = channel < K
        gate = load_masked(gate_ptr, channel, is_in, K < BK).to(tl.float32)
        k = load_masked(k_ptr, channel, is_in, K < BK).to(tl.float32)
        if HAS_READS:
            q = load_masked(q_ptr, channel, is_in, K < BK).to(tl.float32)
        bias = load_masked(dt_bias_ptr, channel, is_in, K < BK).to(tl.float32)
        g = log_decay(gate, bias, rate, inverse_bound)
        if HAS_BOUND:
            least = tl.minimum(least, g if K == BK else tl.where(is_in, g, 1e30))
        middle = tl.dot(to_middle, g.to(SUMS), input_precision=SUM_PRECISION)
        up = tl.exp2(middle)
        k_down = (k * tl.exp2(-middle)).to(OPERAND)
        k_up = (k * up).to(OPERAND)
        tl.store(half_ptr + channel + i * 0, up, mask=i == BT - 1)
        tl.store(writes_ptr + block + tile, k_down)
        tl.store(erase_ptr + block + tile, k_up)
        k_columns = tl.trans(k_down)
        gram = tl.dot(k_up, k_columns, acc=gram, input_precision=PRECISION)
        if HAS_READS:
            q_square += tl.sum(q * q, 1)
            q_up = (q * up).to(OPERAND)
            tl.store(reads_ptr + block + tile, q_up)
            mix = tl.dot(q_up, k_columns, acc=mix, input_precision=PRECISION)

    if HAS_BOUND:
        tl.store(norm_ptr + 2 * BT, -tl.sum(tl.where(is_row, tl.min(least, 1), 0.0)))
    beta = tl.load(
        beta_ptr + (first + row) * stride_bt + head * stride_bh, mask=is_row, other=0.0
    ).to(tl.float32)
    beta = tl.where(is_row, 1.0 / (1.0 + tl.exp2(beta * -1.4426950408889634)), 0.0)
    k_norm = tl.rsqrt(tl.sum(tl.where(i == j, gram, 0.0), 1) + 1e-6)
    lower = tl.where(i > j, gram * (beta * k_norm)[:, None] * k_norm[None, :], 0.0)
    solve = _invert(lower, BT, SOLVE, PRECISION) * beta[None, :] * k_norm[:, None]
    pair = i * BT + j
    tl.store(solve_ptr + pair, solve.to(OPERAND))
    tl.store(norm_ptr + row, -k_norm)
    if HAS_READS:
        tl.store(norm_ptr + BT + row, tl.rsqrt(q_square + 1e-6) * scale)
        tl.store(mix_ptr + pair, tl.where(i >= j, mix, 0.0).to(OPERAND))
