"""All gradients of a KDA chunk but those of v and of the state, by blocks of channels.

Report 1.3 in the terms of prep.py and scan.py: M the state at the middle of the chunk before its
writes, D its deltas, B the gradient at the middle after the writes and dR the gradient of v
(backward_scan.py). Over blocks of values, five products, which share their operands:

    dO D^T, dR D^T [chunk, chunk];  M^T dO^T, M^T dR^T, B^T D^T [K, chunk]

Norms scale rows, so they come after the products. With P and A the causal parts of the first two,
and all below transposed, [K, chunk], so that channels are the long side that a warpgroup's products
want, and what is computed from sums is a left operand in the registers where it lies:

    dreads = dO M + P writes;  derase = dR M + A writes;  dwrites = D B + P^T reads + A^T erase
    dq = dreads up,  dk = derase up + dwrites down        (up = e^(G - T/2), down = 1 / up)

What a token reads of itself (the diagonal of P) comes apart, since it does not decay; the diagonal
of A makes the gradient of beta. A decay has a part in every exponent on its way. With

    x = reads dreads + erase derase - writes dwrites
    dg = colsum(M B) + colsum(writes (D B)) + (sum of x from the token to the end)

Here reads, erase and writes are as rounded for the products: what a pair of tokens adds to x of the
later and takes from x of the earlier then cancels in the sums before both. From unrounded ones it
left an error that all tokens before shared: 1.4e-2 of dt_bias at fast gates instead of 2.3e-3.

Then the gate, dz = dg bound p (1 - p) e^A_log, and the norms, dq -= q (q dq) / |q|^2. Sums of dz
and dz z over the tokens of a chunk go out, for dt_bias and A_log; they are added in a fixed order
later. The sum of x is one product with a triangle of ones; 16-bit operands are split in two for it.

The norms need no sum over channels. o is linear in a query, and the delta rule d = beta (v - S k)
in a key where it reads the state and where it writes, so with unit keys

    q dq = o dO,    k dk = 2 d dv / beta - v dv

Hence blocks of BC channels are apart, each over all values of a chunk and head. The
[chunk, chunk] products are made by each program: a tenth of its work.

Floor at T = 8192, H = 96, K = V = 128, bf16: M and B 1.6 GB, q, k, v, gate, o, dO, dv, D and three
results 2.2 GB, at 4.25 TB/s 0.90 ms; 0.14 TFLOP. One program for all channels, of 8 warps with 255
registers and alone on its multiprocessor, took 2.58 ms on an H200: 186 programs in a row of 23 500
cycles each, of which 6 600 issue its 26 000 instructions of warps; the others wait. Two at 128
registers spilled 190 values and took 3.63 ms. Blocks of 64 channels, 4 warps and 168 registers
fit three times, 12 warps that wait apart: 2.46 ms, with three stages of loads 2.09 ms.
Legend: K, V channels, BT chunk, BK, BV, BC blocks.
"""

import triton
import triton.language as tl

from k3_kernels.kda_chunk.prep import load_masked, log_decay

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _running_sum(x_t, BT: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """Sums of the columns from each column to the end."""
    i = tl.arange(0, BT)[:, None]
    j = tl.arange(0, BT)[None, :]
    ones = tl.where(i >= j, 1.0, 0.0).to(OPERAND)
    coarse = x_t.to(OPERAND)
    total = tl.dot(coarse, ones, input_precision=PRECISION)
    if tl.float32 != OPERAND:
        fine = (x_t - coarse.to(tl.float32)).to(OPERAND)
        total = tl.dot(fine, ones, acc=total, input_precision=PRECISION)
    return total


@triton.jit
def chunk_backward_kernel(
    q_ptr,
    k_ptr,
    gate_ptr,
    beta_ptr,
    A_log_ptr,
    dt_bias_ptr,
    v_ptr,
    o_ptr,
    d_o_ptr,
    d_v_ptr,
    chunk_ptr,
    vector_ptr,
    state_ptr,
    delta_ptr,
    d_state_ptr,
    d_q_ptr,
    d_k_ptr,
    d_gate_ptr,
    d_beta_ptr,
    sum_ptr,
    num_heads,
    num_values,
    lower_bound,
    inverse_scale,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_gt,
    stride_gh,
    stride_bt,
    stride_bh,
    stride_vt,
    stride_vh,
    stride_ot,
    stride_oh,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BC: tl.constexpr,
    BT: tl.constexpr,
    VECTORS: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_READS: tl.constexpr,
    OPERAND: tl.constexpr,
    SUMS: tl.constexpr,
    PRECISION: tl.constexpr,
    SUM_PRECISION: tl.constexpr,
):
    """chunk_ptr: int64 [chunks, 4], first token, tokens, (unused). vector_ptr: prep's. state_ptr,
    d_state_ptr: [chunks, heads, num_values, BK], M and B; delta_ptr: [chunks, heads, num_values,
    BT], D^T; num_values: V rounded up. o_ptr, d_v_ptr, d_q_ptr, d_k_ptr, d_gate_ptr: contiguous
    [T, value heads, channels]; d_beta_ptr: [T, heads]; sum_ptr: float32 [chunks, heads, 2, K], sums
    of dz and dz z. inverse_scale: of the queries. HAS_READS: whether there are queries, o and dO.
    Grid: chunks x value heads x blocks of channels."""
    NUM_BLOCKS: tl.constexpr = BK // BC
    part = tl.program_id(0) % NUM_BLOCKS
    pid = (tl.program_id(0) // NUM_BLOCKS).to(tl.int64)
    head = pid % num_heads
    chunk = pid // num_heads
    first = tl.load(chunk_ptr + 4 * chunk)
    count = tl.load(chunk_ptr + 4 * chunk + 1).to(tl.int32)
    row = tl.arange(0, BT)
    i = row[:, None]
    j = row[None, :]
    is_row = row < count

    v_ptr += first * stride_vt + head * stride_vh
    d_o_ptr += first * stride_ot + head * stride_oh
    d_v_ptr += (first * num_heads + head) * V
    o_ptr += (first * num_heads + head) * V
    delta_ptr += pid * num_values * BT
    state_ptr += pid * num_values * BK
    d_state_ptr += pid * num_values * BK
    lane = tl.arange(0, BV)
    d_o_offset = i * stride_ot + lane[None, :]
    d_v_offset = i * (num_heads * V) + lane[None, :]
    v_offset = i * stride_vt + lane[None, :]
    delta_offset = lane[:, None] * BT + j
    mix = tl.zeros((BT, BT), dtype=tl.float32)
    gram = tl.zeros((BT, BT), dtype=tl.float32)
    q_parts = tl.zeros((BT, BV), dtype=tl.float32)
    k_parts = tl.zeros((BT, BV), dtype=tl.float32)
    for block in tl.range(0, num_values, BV, num_stages=STAGES):
        is_value = is_row[:, None] & (block + lane < V)[None, :]
        if HAS_READS:
            d_o = tl.load(d_o_ptr + block + d_o_offset, mask=is_value, other=0.0)
        d_v = tl.load(d_v_ptr + block + d_v_offset, mask=is_value, other=0.0)
        delta_t = tl.load(delta_ptr + block * BT + delta_offset)
        if HAS_READS:
            o = tl.load(o_ptr + block + d_v_offset, mask=is_value, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + block + v_offset, mask=is_value, other=0.0).to(tl.float32)
        if HAS_READS:
            mix = tl.dot(d_o.to(OPERAND), delta_t, acc=mix, input_precision=PRECISION)
        gram = tl.dot(d_v.to(OPERAND), delta_t, acc=gram, input_precision=PRECISION)
        if HAS_READS:
            q_parts += o * d_o.to(tl.float32)
        k_parts += v * d_v.to(tl.float32)

    # Norms: k_norm is -1 / |k|, q_norm scale / |q|.
    vector_ptr += pid * VECTORS + BK
    k_norm = tl.load(vector_ptr + row)
    if HAS_READS:
        q_norm = tl.load(vector_ptr + BT + row)
        mix *= q_norm[:, None]
    gram *= k_norm[:, None]
    if HAS_READS:
        d_self = tl.sum(tl.where(i == j, mix, 0.0), 1)
    beta_offset = (first + row) * stride_bt + head * stride_bh
    beta = tl.load(beta_ptr + beta_offset, mask=is_row, other=0.0).to(tl.float32)
    beta = 1.0 / (1.0 + tl.exp2(beta * -LOG2_E))
    erased = tl.sum(tl.where(i == j, gram, 0.0), 1) / tl.maximum(beta, 1e-30)
    d_beta = erased * (beta - 1.0) / (k_norm * k_norm)
    d_beta_ptr += (first + row) * num_heads + head
    tl.store(d_beta_ptr, d_beta.to(d_beta_ptr.dtype.element_ty), mask=is_row & (part == 0))
    if HAS_READS:
        q_along = tl.sum(q_parts, 1) * q_norm * q_norm * (inverse_scale * inverse_scale)
    k_along = tl.sum(k_parts, 1) * -(k_norm * k_norm) - 2.0 * erased
    if HAS_READS:
        mix = tl.where(i > j, mix, 0.0).to(OPERAND)
    gram = tl.where(i > j, gram, 0.0).to(OPERAND)

    # What a block of channels needs of a token is on its way while the states come.
    token = first + tl.minimum(row, count - 1)[:, None]
    q_ptr += token * stride_qt + (head // GROUP) * stride_qh
    k_ptr += token * stride_kt + (head // GROUP) * stride_kh
    gate_ptr += token * stride_gt + head * stride_gh
    rate = tl.exp2(tl.load(A_log_ptr + head).to(tl.float32) * LOG2_E)
    rate = tl.maximum(rate, 1e-30)
    inverse_bound = -1.0 / (lower_bound * LOG2_E)
    to_middle = tl.where(i < count, tl.where(j >= i, -0.5, 0.5), 0.0).to(SUMS)
    out_offset = ((first + i) * num_heads + head) * K
    sum_ptr += pid * 2 * K
    channel = part * BC + tl.arange(0, BC)
    column = channel[None, :]
    is_channel = channel < K
    is_column = column < K
    gate = load_masked(gate_ptr, column, is_column, K < BK)
    k_rows = load_masked(k_ptr, column, is_column, K < BK)
    if HAS_READS:
        q_rows = load_masked(q_ptr, column, is_column, K < BK)
    bias = load_masked(dt_bias_ptr + head * K, channel, is_channel, K < BK).to(tl.float32)
    bias = bias[:, None]

    state_offset = lane[:, None] * BK + column
    d_reads = tl.zeros((BC, BT), dtype=tl.float32)
    d_erase = tl.zeros((BC, BT), dtype=tl.float32)
    d_writes = tl.zeros((BC, BT), dtype=tl.float32)
    whole_parts = tl.zeros((BV, BC), dtype=tl.float32)
    for block in tl.range(0, num_values, BV, num_stages=STAGES):
        is_value = is_row[:, None] & (block + lane < V)[None, :]
        state = tl.load(state_ptr + block * BK + state_offset)
        d_state = tl.load(d_state_ptr + block * BK + state_offset)
        if HAS_READS:
            d_o = tl.load(d_o_ptr + block + d_o_offset, mask=is_value, other=0.0).to(OPERAND)
        d_v = tl.load(d_v_ptr + block + d_v_offset, mask=is_value, other=0.0).to(OPERAND)
        delta_t = tl.load(delta_ptr + block * BT + delta_offset)
        if HAS_READS:
            d_reads = tl.dot(tl.trans(state), tl.trans(d_o), acc=d_reads, input_precision=PRECISION)
        d_erase = tl.dot(tl.trans(state), tl.trans(d_v), acc=d_erase, input_precision=PRECISION)
        d_writes = tl.dot(tl.trans(d_state), delta_t, acc=d_writes, input_precision=PRECISION)
        whole_parts += state.to(tl.float32) * d_state.to(tl.float32)
    d_whole = tl.sum(whole_parts, 0)

    # The operands of the forward, as prep.py makes them.
    g = log_decay(tl.trans(gate).to(tl.float32), bias, rate * -LOG2_E, inverse_bound)
    middle = tl.dot(g.to(SUMS), to_middle, input_precision=SUM_PRECISION)
    up = tl.exp2(middle)
    down = tl.exp2(-middle)
    k = tl.trans(k_rows).to(tl.float32)
    writes = (k * down).to(OPERAND)
    erase = (k * up).to(OPERAND)
    d_own = tl.sum(d_writes * writes.to(tl.float32), 1)
    d_erase = d_erase * k_norm[None, :]
    d_erase = tl.dot(writes, tl.trans(gram), acc=d_erase, input_precision=PRECISION)
    d_writes = tl.dot(erase, gram, acc=d_writes, input_precision=PRECISION)
    x = erase.to(tl.float32) * d_erase
    d_k = d_erase * up - k_along[None, :] * k
    if HAS_READS:
        q = tl.trans(q_rows).to(tl.float32)
        reads = (q * up).to(OPERAND)
        d_reads = d_reads * q_norm[None, :]
        d_reads = tl.dot(writes, tl.trans(mix), acc=d_reads, input_precision=PRECISION)
        d_writes = tl.dot(reads, mix, acc=d_writes, input_precision=PRECISION)
        x += reads.to(tl.float32) * d_reads
    x -= writes.to(tl.float32) * d_writes
    offset = out_offset + column
    is_in = is_row[:, None] & is_column
    if HAS_READS:
        d_q = d_reads * up + d_self[None, :] * k - q_along[None, :] * q
        tl.store(d_q_ptr + offset, tl.trans(d_q.to(d_q_ptr.dtype.element_ty)), mask=is_in)
    d_written = d_writes * down
    if HAS_READS:
        d_written += d_self[None, :] * q
    d_k += d_written
    tl.store(d_k_ptr + offset, tl.trans(d_k.to(d_k_ptr.dtype.element_ty)), mask=is_in)

    # The gate is loaded again, rather than kept in registers. One of -inf has share 0 and no part.
    gate = tl.trans(load_masked(gate_ptr, column, is_column, K < BK)).to(tl.float32)
    gate = tl.maximum(gate, -1e30)
    share = log_decay(gate, bias, rate * -LOG2_E, inverse_bound) * inverse_bound
    d_g = _running_sum(x, BT, OPERAND, SUM_PRECISION) + d_own[:, None] + d_whole[:, None]
    d_z = d_g * (share - share * share) * (lower_bound * rate)
    d_z = tl.where(is_row[None, :], d_z, 0.0)
    d_gate = tl.trans(d_z.to(d_gate_ptr.dtype.element_ty))
    tl.store(d_gate_ptr + offset, d_gate, mask=is_in)
    tl.store(sum_ptr + channel, tl.sum(d_z, 1), mask=is_channel)
    tl.store(sum_ptr + K + channel, tl.sum(d_z * (gate + bias), 1), mask=is_channel)
