"""The serial part of KDA: a state slab through the chunks of one piece (report 1.2, 1.7).

One program owns BV rows of the [V, K] state of one piece (a sequence, or a segment of one) and
head: rows evolve independently, so V is split freely. The slab is the float32 accumulator of the
tensor cores and never leaves registers: the state and the writes D are left operands (from
registers on Hopper), all tiles that prep stored are right operands (from shared memory, filled
ahead by the pipeliner). No accumulator is transposed for a product. With the tiles of prep.py, all
of whose exponents count from the middle of the chunk, and M the state at the middle:

    D = V^T solve^T + (M erase^T) diag(-1 / |k|) solve^T
    o^T = (M reads^T + D mix^T) diag(scale / |q|)
    S <- (M + D writes) diag(half),    M = S diag(half) at the start of a chunk

Three products depend on each other in a chunk; the output hangs off the chain. Prep could fold
`solve` into `erase` and save the second, for a second pass over two of its tiles. On an H200 at
T = 8192, H = 96 that cost prep 0.05 ms and saved 0.08 ms here, before prep loaded its tiles ahead.

As a summary (IS_SUMMARY) the same loop, seeded with zero for the first blocks and with the
identity and no values for the others, ends in the affine map (S, M) of the piece. With a bound of
what the chunks leave of a state (prep.py) it may begin late, where less than 2^forget of any state
is left at the piece's end: M is then 0, marked in `kept`, and S made of the last chunks only.

States are exported between runs of chunks, not in the loop: a store in the loop wants 30 KB of
shared memory, without which a multiprocessor holds two programs. Only the last chunk of a run can
be short.

For the backward (IS_KEPT), with or without outputs, it keeps M and D^T of every chunk and head, as
the products took them: states [V, K], deltas [V, chunk], with V and K rounded up.
Legend: K, V channels, BT chunk, BK, BV blocks; tiles and vectors as prep.py lays them out.
"""

import triton
import triton.language as tl

from k3_kernels.kda_chunk.start import start_state


@triton.jit
def scan_kernel(
    v_ptr,
    o_ptr,
    tile_ptr,
    vector_ptr,
    piece_ptr,
    chunk_ptr,
    initial_ptr,
    final_ptr,
    map_ptr,
    kept_ptr,
    export_ptr,
    states_ptr,
    deltas_ptr,
    num_heads,
    num_runs,
    forget,
    stride_vt,
    stride_vh,
    stride_ot,
    stride_oh,
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
    HAS_INITIAL: tl.constexpr,
    HAS_CARRY: tl.constexpr,
    HAS_FINAL: tl.constexpr,
    HAS_EXPORTS: tl.constexpr,
    IS_CUT: tl.constexpr,
    IS_SUMMARY: tl.constexpr,
    IS_KEPT: tl.constexpr,
    HAS_OUTPUT: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """piece_ptr: int64 [pieces, 6]: first token, tokens, first chunk, chunks, index of the initial
    state (-1 - n: what final_ptr has for n), index of the final state (-1: none). chunk_ptr: int64
    [chunks, 4], first token, tokens, index of the state to export after it (-1: none), chunks to
    the end of its run. Unless IS_CUT a piece is one run; num_runs: of a piece, at most. MAX_CHUNKS
    of a piece: 0 without bounds, else a power of two. Grid: pieces x heads x blocks."""
    pid = tl.program_id(0).to(tl.int64)
    block = pid % NUM_BLOCKS
    head = (pid // NUM_BLOCKS) % num_heads
    piece_ptr += 6 * (pid // NUM_BLOCKS // num_heads)
    first = tl.load(piece_ptr)
    num_tokens = tl.load(piece_ptr + 1)
    first_chunk = tl.load(piece_ptr + 2)
    num_chunks = tl.load(piece_ptr + 3).to(tl.int32)
    initial_index = tl.load(piece_ptr + 4)
    final_index = tl.load(piece_ptr + 5)

    if MAX_CHUNKS > 0:
        place = tl.arange(0, MAX_CHUNKS)
        is_chunk = place < num_chunks
        bound_ptr = vector_ptr + (first_chunk * num_heads + head) * VECTORS + BK + 2 * BT
        left = tl.load(bound_ptr + place * (num_heads * VECTORS), mask=is_chunk, other=0.0)
        is_late = (tl.cumsum(left, 0, reverse=True) <= forget) & is_chunk
        skipped = tl.max(tl.where(is_late, place, 0), 0)
        is_forgotten = tl.max(is_late.to(tl.int32), 0) > 0
        # The map of a piece that forgets is zero; its blocks have nothing to do.
        skipped = tl.where(is_forgotten & (block >= NUM_VALUE_BLOCKS), num_chunks, skipped)
        first_chunk += skipped
        num_chunks -= skipped
        num_tokens -= skipped * BT
        first = tl.load(chunk_ptr + 4 * first_chunk, mask=num_chunks > 0, other=0)

    row = tl.arange(0, BT)
    channel = tl.arange(0, BK)
    value = block * BV + tl.arange(0, BV)
    is_state = (value < V)[:, None] & (channel < K)[None, :]
    state_offset = value[:, None] * K + channel[None, :]
    unit = value - NUM_VALUE_BLOCKS * BV
    if IS_SUMMARY:
        state = tl.where(unit[:, None] == channel[None, :], 1.0, 0.0)
        if MAX_CHUNKS > 0:
            state = tl.where(is_forgotten, 0.0, state)
    else:
        state = start_state(
            initial_ptr,
            final_ptr,
            initial_index,
            head * (V * K),
            num_heads * (V * K),
            state_offset,
            is_state,
            HAS_INITIAL,
            HAS_CARRY,
        )

    # One scalar base a tensor moves with the chunk; the offsets inside a tile are shared.
    tile_offset = row[:, None] * BK + channel[None, :]
    pair_offset = row[:, None] * BT + row[None, :]
    v_ptr += first * stride_vt + head * stride_vh + block * BV
    o_ptr += first * stride_ot + head * stride_oh + block * BV
    v_offset = row[:, None] * stride_vt + tl.arange(0, BV)[None, :]
    o_offset = row[:, None] * stride_ot + tl.arange(0, BV)[None, :]
    is_value = (value < V)[None, :]

    tile_ptr += (first_chunk * num_heads + head) * TILES
    vector_ptr += (first_chunk * num_heads + head) * VECTORS
    done = 0
    for _ in range(num_runs if IS_CUT else 1):
        run, run_tokens = num_chunks, num_tokens
        if IS_CUT:
            run_ptr = chunk_ptr + 4 * (first_chunk + done)
            run = tl.load(run_ptr + 3, mask=done < num_chunks, other=0).to(tl.int32)
            run = tl.minimum(run, num_chunks - done)
            run_ptr += 4 * (run - 1)
            run_tokens = tl.load(run_ptr + 1, mask=run > 0, other=0) + (run - 1) * BT
        # With a number of stages the vectors, which feed no product, are loaded ahead as well.
        for step in tl.range(0, run, num_stages=STAGES):
            count = tl.minimum(run_tokens - step * BT, BT)
            is_token = (row < count)[:, None] & is_value
            half = tl.load(vector_ptr + channel)[None, :]
            erase = tl.load(tile_ptr + tile_offset)
            k_norm = tl.load(vector_ptr + BK + row)
            v_t = tl.trans(tl.load(v_ptr + v_offset, mask=is_token, other=0.0).to(OPERAND))
            solve = tl.load(tile_ptr + 2 * BT * BK + pair_offset)
            writes = tl.load(tile_ptr + BT * BK + tile_offset)

            # By half twice, not by its square, which underflows where gates are fast.
            state = state * half
            operand = state.to(OPERAND)
            erased = tl.dot(operand, tl.trans(erase), input_precision=PRECISION)
            delta = tl.dot(v_t, tl.trans(solve), input_precision=PRECISION)
            erased = (erased * k_norm[None, :]).to(OPERAND)
            delta = tl.dot(erased, tl.trans(solve), acc=delta, input_precision=PRECISION)
            delta = delta.to(OPERAND)
            state = tl.dot(delta, writes, acc=state, input_precision=PRECISION) * half
            if IS_KEPT:
                row_of_V = (first_chunk + done + step) * num_heads + head
                row_of_V = row_of_V * (NUM_BLOCKS * BV) + block * BV + tl.arange(0, BV)[:, None]
                tl.store(states_ptr + row_of_V * BK + channel[None, :], operand)
                tl.store(deltas_ptr + row_of_V * BT + row[None, :], delta)
            if HAS_OUTPUT:
                reads_ptr = tile_ptr + 2 * BT * BK + BT * BT
                reads = tl.load(reads_ptr + tile_offset)
                mix = tl.load(reads_ptr + BT * BK + pair_offset)
                q_norm = tl.load(vector_ptr + BK + BT + row)
                out = tl.dot(operand, tl.trans(reads), input_precision=PRECISION)
                out = tl.dot(delta, tl.trans(mix), acc=out, input_precision=PRECISION)
                out = tl.trans(out * q_norm[None, :]).to(o_ptr.dtype.element_ty)
                tl.store(o_ptr + o_offset, out, mask=is_token)
                o_ptr += count * stride_ot
            v_ptr += count * stride_vt
            tile_ptr += num_heads * TILES
            vector_ptr += num_heads * VECTORS
        if HAS_EXPORTS:
            index = tl.load(run_ptr + 2, mask=run > 0, other=-1)
            offset = (index * num_heads + head) * (V * K)
            is_exported = is_state & (index >= 0)
            tl.store(export_ptr + offset + state_offset, state, mask=is_exported)
        done += run

    if HAS_FINAL:
        offset = (final_index * num_heads + head) * (V * K)
        tl.store(final_ptr + offset + state_offset, state, mask=is_state & (final_index >= 0))
    if IS_SUMMARY:
        offset = (final_index * num_heads + head) * (K * K)
        is_unit = ((unit >= 0) & (unit < K))[:, None] & (channel < K)[None, :]
        tl.store(map_ptr + offset + unit[:, None] * K + channel[None, :], state, mask=is_unit)
        if MAX_CHUNKS > 0:
            kept_ptr += final_index * num_heads + head
            is_first = block == NUM_VALUE_BLOCKS
            tl.store(kept_ptr, tl.where(is_forgotten, 0, 1), mask=is_first)
