"""Start states of the segments of a sequence from their affine maps (report 1.6, 1.7).

S_{j+1} = S_j M_j + S~_j, one program a sequence, head and BV state rows, serial over segments. The
maps are long products and stay float32; the product runs in tf32x3 on the GPU (half a percent of
the work of the scan), so that a sequence cut in pieces agrees with the uncut one.
Legend: K, V channels; J segments in all, numbered sequence after sequence.
"""

import triton
import triton.language as tl


@triton.jit
def combine_kernel(
    initial_ptr,
    map_ptr,
    shift_ptr,
    start_ptr,
    segment_ptr,
    num_heads,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """initial [N, H, V, K], map [J, H, K, K], shift [J, H, V, K] -> start [J, H, V, K];
    segment_ptr: int64 [N + 1], first segment of each sequence. Grid: N x H x blocks."""
    pid = tl.program_id(0).to(tl.int64)
    block = pid % NUM_BLOCKS
    head = (pid // NUM_BLOCKS) % num_heads
    sequence = pid // NUM_BLOCKS // num_heads
    segment = tl.load(segment_ptr + sequence)
    end = tl.load(segment_ptr + sequence + 1)

    channel = tl.arange(0, BK)
    value = block * BV + tl.arange(0, BV)
    is_state = (value < V)[:, None] & (channel < K)[None, :]
    state_offset = value[:, None] * K + channel[None, :]
    is_map = (channel < K)[:, None] & (channel < K)[None, :]
    map_offset = channel[:, None] * K + channel[None, :]
    state = tl.zeros((BV, BK), dtype=tl.float32)
    if HAS_INITIAL:
        offset = (sequence * num_heads + head) * (V * K)
        state = tl.load(initial_ptr + offset + state_offset, mask=is_state, other=0.0)
    for j in range(segment, end):
        index = j * num_heads + head
        tl.store(start_ptr + index * (V * K) + state_offset, state, mask=is_state)
        if j + 1 < end:
            transition = tl.load(map_ptr + index * (K * K) + map_offset, mask=is_map, other=0.0)
            shift = tl.load(shift_ptr + index * (V * K) + state_offset, mask=is_state, other=0.0)
            state = tl.dot(state, transition, acc=shift, input_precision=PRECISION)
