"""The serial part of KDA: a state slab through the chunks of one piece (report 1.2, 1.7).

One program owns BV rows of the [V, K] state of one piece (a sequence, or a segment of one) and
head: rows evolve independently, so V is split freely. The slab is the float32 accumulator of the
tensor cores and never leaves registers: the state and the writes D are left operands (from
registers on Hopper), all tiles that prep stored are right operands (from shared memory, filled
ahead by the pipeliner). No accumulator is transposed for a product. Per chunk only two products
depend on each other: state -> D -> state; the output hangs off the chain.

As a summary (IS_SUMMARY) the same loop, seeded with zero for the first blocks and with the
identity and no values for the others, ends in the affine map (S, M) of the piece.

On paper, H200, T = 8192, H = 96, chunk 64, V block 128, 8 warps: 96 programs of one per
multiprocessor (164 KiB of shared memory, two stages), 96 KiB a step and program. Memory at
4.26 TB/s allows 2.2 us a step, 0.29 ms in all; the tensor cores need 1024 cycles (0.6 us), the
shared-memory fill 1500 (0.86 us at 64 B a cycle from the L2), the chain about 0.9 us. With 24 heads
the fill is the limit: 0.11 ms for 128 steps, and a narrower V block loads the same tiles, so that
it cannot help. Legend: K, V channels, BT chunk, BK, BV blocks; workspace tiles are
[chunks, heads, ...] as prep wrote them.
"""

import triton
import triton.language as tl


@triton.jit
def scan_kernel(
    v_ptr,
    o_ptr,
    erase_ptr,
    reads_ptr,
    writes_ptr,
    solve_ptr,
    mix_ptr,
    decay_ptr,
    piece_ptr,
    initial_ptr,
    final_ptr,
    map_ptr,
    num_heads,
    stride_vt,
    stride_vh,
    stride_ot,
    stride_oh,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BT: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    NUM_VALUE_BLOCKS: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    HAS_FINAL: tl.constexpr,
    IS_SUMMARY: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """piece_ptr: int64 [pieces, 5]: first token, number of tokens, first chunk, index of the
    initial state, index of the final state (-1: none). Grid: pieces x heads x blocks."""
    pid = tl.program_id(0).to(tl.int64)
    block = pid % NUM_BLOCKS
    head = (pid // NUM_BLOCKS) % num_heads
    piece_ptr += 5 * (pid // NUM_BLOCKS // num_heads)
    first = tl.load(piece_ptr)
    num_tokens = tl.load(piece_ptr + 1)
    first_chunk = tl.load(piece_ptr + 2)
    initial_index = tl.load(piece_ptr + 3)
    final_index = tl.load(piece_ptr + 4)

    row = tl.arange(0, BT)
    channel = tl.arange(0, BK)
    value = block * BV + tl.arange(0, BV)
    is_state = (value < V)[:, None] & (channel < K)[None, :]
    state_offset = value[:, None] * K + channel[None, :]
    unit = value - NUM_VALUE_BLOCKS * BV
    if IS_SUMMARY:
        state = tl.where(unit[:, None] == channel[None, :], 1.0, 0.0)
    elif HAS_INITIAL:
        offset = (initial_index * num_heads + head) * (V * K)
        state = tl.load(initial_ptr + offset + state_offset, mask=is_state, other=0.0)
    else:
        state = tl.zeros((BV, BK), dtype=tl.float32)

    # One scalar base a tensor moves with the chunk; the offsets inside a tile are shared.
    tile = first_chunk * num_heads + head
    tile_offset = row[:, None] * BK + channel[None, :]
    pair_offset = row[:, None] * BT + row[None, :]
    v_ptr += first * stride_vt + head * stride_vh + block * BV
    o_ptr += first * stride_ot + head * stride_oh + block * BV
    v_offset = row[:, None] * stride_vt + tl.arange(0, BV)[None, :]
    o_offset = row[:, None] * stride_ot + tl.arange(0, BV)[None, :]
    is_value = (value < V)[None, :]

    # The decay feeds no product, so the pipeliner leaves it: loaded a chunk ahead by hand.
    decay = tl.load(decay_ptr + tile * BK + channel, mask=channel < num_tokens * BK, other=1.0)
    for start in range(0, num_tokens, BT):
        is_token = (row < num_tokens - start)[:, None] & is_value
        v_t = tl.trans(tl.load(v_ptr + v_offset, mask=is_token, other=0.0).to(OPERAND))
        erase = tl.load(erase_ptr + tile * (BT * BK) + tile_offset)
        writes = tl.load(writes_ptr + tile * (BT * BK) + tile_offset)
        solve = tl.load(solve_ptr + tile * (BT * BT) + pair_offset)
        is_more = channel < (num_tokens - start - BT) * BK
        next_decay = tl.load(decay_ptr + (tile + num_heads) * BK + channel, mask=is_more, other=1.0)
        state_operand = state.to(OPERAND)
        delta = tl.dot(v_t, tl.trans(solve), input_precision=PRECISION)
        delta = tl.dot(state_operand, tl.trans(erase), acc=delta, input_precision=PRECISION)
        if not IS_SUMMARY:
            mix = tl.load(mix_ptr + tile * (BT * BT) + pair_offset)
            reads = tl.load(reads_ptr + tile * (BT * BK) + tile_offset)
            out = tl.dot(v_t, tl.trans(mix), input_precision=PRECISION)
            out = tl.dot(state_operand, tl.trans(reads), acc=out, input_precision=PRECISION)
        state = state * decay[None, :]
        state = tl.dot(delta.to(OPERAND), writes, acc=state, input_precision=PRECISION)
        if not IS_SUMMARY:
            tl.store(o_ptr + o_offset, tl.trans(out).to(o_ptr.dtype.element_ty), mask=is_token)
            o_ptr += BT * stride_ot
        v_ptr += BT * stride_vt
        tile += num_heads
        decay = next_decay

    if HAS_FINAL:
        offset = (final_index * num_heads + head) * (V * K)
        tl.store(final_ptr + offset + state_offset, state, mask=is_state & (final_index >= 0))
    if IS_SUMMARY:
        offset = (final_index * num_heads + head) * (K * K)
        is_unit = ((unit >= 0) & (unit < K))[:, None] & (channel < K)[None, :]
        tl.store(map_ptr + offset + unit[:, None] * K + channel[None, :], state, mask=is_unit)
