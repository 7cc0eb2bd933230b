"""The serial part of KDA's backward: the gradient of a state, chunk by chunk from the last.

Report 1.3 with the tiles of prep.py. As in scan.py a program owns BV rows of the [V, K] gradient,
which is the float32 accumulator of the tensor cores. With B the gradient at the middle of a chunk,
after its writes, dO' = dO scale / |q|, and dR the gradient of what the values are corrected to:

    B = dS diag(half) at the end of a chunk
    dR^T = (dO'^T mix + B writes^T) solve
    dS <- (B + dO'^T reads - (dR^T diag(1 / |k|)) erase) diag(half)

dR is the gradient of v. The kernel keeps B of every chunk and head, for the last kernel.

The recurrence is linear in dS, so a sequence can be cut into segments as in scan.py, taken last
first: as a summary (IS_SUMMARY) the loop keeps nothing and, seeded with zero for the first blocks
and with the identity and no dO for the others, ends in the map dS -> dS A + C of a piece. A is the
transpose of the piece's map of states, and forgets as it does: with prep's bounds the loop begins
where less than 2^forget of any gradient is left before the piece; A is then 0.

Floor at T = 8192, H = 96, K = V = 128, bf16: tiles 0.7 GB, dO and dv 0.4 GB, B 0.8 GB, at 4.25 TB/s
0.45 ms; 0.08 TFLOP, 0.11 ms. Measured on an H200: 0.76 ms with blocks of 64 values, 1.2 ms with 32.
At T = 65536, H = 24 it is 4.1 ms uncut, of its own chain: 2048 chunks of 2.0 us, on 48 programs; in
three segments a slab 1.8 ms, and their maps 0.2 ms with fast gates, 1.1 ms with slow ones.
Legend: K, V channels, BT chunk, BK, BV blocks; tiles and vectors as prep.py lays them out.
"""

import triton
import triton.language as tl


@triton.jit
def reverse_kernel(
    d_o_ptr,
    d_v_ptr,
    tile_ptr,
    vector_ptr,
    piece_ptr,
    start_ptr,
    end_ptr,
    map_ptr,
    known_ptr,
    kept_ptr,
    num_heads,
    forget,
    stride_ot,
    stride_oh,
    stride_vt,
    stride_vh,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BT: tl.constexpr,
    TILES: tl.constexpr,
    VECTORS: tl.constexpr,
    STAGES: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    NUM_VALUE_BLOCKS: tl.constexpr,
    IS_SUMMARY: tl.constexpr,
    HAS_READS: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """piece_ptr: as in scan.py; its last columns number a piece's state of start_ptr, gradients
    after the piece, and that of end_ptr (-1: none), before it: float32 [.., heads, V, K]. map_ptr,
    known_ptr: of a summary, by that number, [.., heads, K, K], A, and int32 [.., heads], 0 where
    it is 0. kept_ptr: [chunks, heads, NUM_BLOCKS BV, BK], B. All chunks of a piece but the last are
    full. HAS_READS: is there dO. MAX_CHUNKS: as in scan.py. Grid: pieces x heads x blocks."""
    pid = tl.program_id(0).to(tl.int64)
    block = pid % NUM_BLOCKS
    head = (pid // NUM_BLOCKS) % num_heads
    piece_ptr += 6 * (pid // NUM_BLOCKS // num_heads)
    first = tl.load(piece_ptr)
    num_tokens = tl.load(piece_ptr + 1)
    first_chunk = tl.load(piece_ptr + 2)
    num_chunks = tl.load(piece_ptr + 3).to(tl.int32)
    start = tl.load(piece_ptr + 4)
    end = tl.load(piece_ptr + 5)

    if MAX_CHUNKS > 0:
        place = tl.arange(0, MAX_CHUNKS)
        is_chunk = place < num_chunks
        bound_ptr = vector_ptr + (first_chunk * num_heads + head) * VECTORS + BK + 2 * BT
        left = tl.load(bound_ptr + place * (num_heads * VECTORS), mask=is_chunk, other=0.0)
        is_early = (tl.cumsum(left, 0) <= forget) & is_chunk
        is_forgotten = tl.max(is_early.to(tl.int32), 0) > 0
        num_chunks = tl.min(tl.where(is_early, place + 1, num_chunks), 0)
        # The map of a piece that forgets is zero; its blocks have nothing to do.
        num_chunks = tl.where(is_forgotten & (block >= NUM_VALUE_BLOCKS), 0, num_chunks)

    row = tl.arange(0, BT)
    channel = tl.arange(0, BK)
    value = block * BV + tl.arange(0, BV)
    is_state = (value < V)[:, None] & (channel < K)[None, :]
    is_value = (value < V)[None, :]
    state_offset = value[:, None] * K + channel[None, :]
    unit = value - NUM_VALUE_BLOCKS * BV
    if IS_SUMMARY:
        d_state = tl.where(unit[:, None] == channel[None, :], 1.0, 0.0)
        if MAX_CHUNKS > 0:
            d_state = tl.where(is_forgotten, 0.0, d_state)
    else:
        start_ptr += (start * num_heads + head) * (V * K)
        d_state = tl.load(start_ptr + state_offset, mask=is_state, other=0.0)

    tile_offset = row[:, None] * BK + channel[None, :]
    pair_offset = row[:, None] * BT + row[None, :]
    o_offset = row[:, None] * stride_ot + tl.arange(0, BV)[None, :]
    v_offset = row[:, None] * stride_vt + tl.arange(0, BV)[None, :]
    kept_offset = tl.arange(0, BV)[:, None] * BK + channel[None, :]
    last = num_chunks - 1
    last_chunk = (first_chunk + last) * num_heads + head
    tile_ptr += last_chunk * TILES
    vector_ptr += last_chunk * VECTORS
    kept_ptr += (last_chunk * NUM_BLOCKS + block) * (BV * BK)
    d_o_ptr += (first + last * BT) * stride_ot + head * stride_oh + block * BV
    d_v_ptr += (first + last * BT) * stride_vt + head * stride_vh + block * BV
    for step in tl.range(0, num_chunks, num_stages=STAGES):
        is_token = (row < num_tokens - (last - step) * BT)[:, None] & is_value
        half = tl.load(vector_ptr + channel)[None, :]
        writes = tl.load(tile_ptr + BT * BK + tile_offset)
        if HAS_READS:
            d_o = tl.load(d_o_ptr + o_offset, mask=is_token, other=0.0)
            q_norm = tl.load(vector_ptr + BK + BT + row)
            mix = tl.load(tile_ptr + 3 * BT * BK + BT * BT + pair_offset)
        solve = tl.load(tile_ptr + 2 * BT * BK + pair_offset)
        k_norm = tl.load(vector_ptr + BK + row)
        if HAS_READS:
            reads = tl.load(tile_ptr + 2 * BT * BK + BT * BT + tile_offset)
        erase = tl.load(tile_ptr + tile_offset)

        d_state = d_state * half
        operand = d_state.to(OPERAND)
        if not IS_SUMMARY:
            tl.store(kept_ptr + kept_offset, operand)
        d_delta = tl.zeros((BV, BT), tl.float32)
        if HAS_READS:
            d_o_t = (tl.trans(d_o).to(tl.float32) * q_norm[None, :]).to(OPERAND)
            d_delta = tl.dot(d_o_t, mix, input_precision=PRECISION)
        d_delta = tl.dot(operand, tl.trans(writes), acc=d_delta, input_precision=PRECISION)
        d_error = tl.dot(d_delta.to(OPERAND), solve, input_precision=PRECISION)
        d_erased = (d_error * k_norm[None, :]).to(OPERAND)
        if HAS_READS:
            d_state = tl.dot(d_o_t, reads, acc=d_state, input_precision=PRECISION)
        d_state = tl.dot(d_erased, erase, acc=d_state, input_precision=PRECISION) * half
        if not IS_SUMMARY:
            d_v = tl.trans(d_error).to(d_v_ptr.dtype.element_ty)
            tl.store(d_v_ptr + v_offset, d_v, mask=is_token)

        tile_ptr -= num_heads * TILES
        vector_ptr -= num_heads * VECTORS
        kept_ptr -= num_heads * (NUM_BLOCKS * BV * BK)
        d_o_ptr -= BT * stride_ot
        d_v_ptr -= BT * stride_vt

    end_offset = (end * num_heads + head) * (V * K)
    tl.store(end_ptr + end_offset + state_offset, d_state, mask=is_state & (end >= 0))
    if IS_SUMMARY:
        offset = (end * num_heads + head) * (K * K)
        is_unit = ((unit >= 0) & (unit < K))[:, None] & (channel < K)[None, :]
        tl.store(map_ptr + offset + unit[:, None] * K + channel[None, :], d_state, mask=is_unit)
        if MAX_CHUNKS > 0:
            known_ptr += end * num_heads + head
            is_first = block == NUM_VALUE_BLOCKS
            tl.store(known_ptr, tl.where(is_forgotten, 0, 1), mask=is_first)
