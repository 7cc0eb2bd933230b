"""Start states of the segments of a sequence from their affine maps (report 1.6, 1.7).

S_{j+1} = S_j M_j + S~_j, one program a part of a sequence, head and BV state rows, serial over
segments. The maps are long products and stay float32; the product runs in tf32x3 on the GPU (half
a percent of the work of the scan), so that a sequence cut in pieces agrees with the uncut one. A
segment that forgets all that came before it (scan.py) has no map to load or to multiply by.
Legend: K, V channels; P parts of sequences; J segments in all, numbered part after part.
"""

import triton
import triton.language as tl

from k3_kernels.kda_chunk.start import start_state


@triton.jit
def combine_kernel(
    initial_ptr,
    map_ptr,
    shift_ptr,
    kept_ptr,
    start_ptr,
    carry_ptr,
    part_ptr,
    num_heads,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    HAS_CARRY: tl.constexpr,
    HAS_BOUND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """initial [N, H, V, K], map [J, H, K, K], shift [J, H, V, K], kept [J, H] (with HAS_BOUND, 0
    where the map is zero) -> start [J, H, V, K]; part_ptr:
    int64 [P + 1, 2], first segment of each part of a sequence, and its initial state (-1 - n: what
    carry_ptr [N, H, V, K] has for n). Grid: P x H x blocks."""
    pid = tl.program_id(0).to(tl.int64)
    block = pid % NUM_BLOCKS
    head = (pid // NUM_BLOCKS) % num_heads
    part_ptr += 2 * (pid // NUM_BLOCKS // num_heads)
    segment = tl.load(part_ptr)
    initial_index = tl.load(part_ptr + 1)
    end = tl.load(part_ptr + 2)

    channel = tl.arange(0, BK)
    value = block * BV + tl.arange(0, BV)
    is_state = (value < V)[:, None] & (channel < K)[None, :]
    state_offset = value[:, None] * K + channel[None, :]
    is_map = (channel < K)[:, None] & (channel < K)[None, :]
    map_offset = channel[:, None] * K + channel[None, :]
    state = start_state(
        initial_ptr,
        carry_ptr,
        initial_index,
        head * (V * K),
        num_heads * (V * K),
        state_offset,
        is_state,
        HAS_INITIAL,
        HAS_CARRY,
    )
    for j in range(segment, end):
        index = j * num_heads + head
        tl.store(start_ptr + index * (V * K) + state_offset, state, mask=is_state)
        if j + 1 < end:
            shift = tl.load(shift_ptr + index * (V * K) + state_offset, mask=is_state, other=0.0)
            is_kept = tl.load(kept_ptr + index) != 0 if HAS_BOUND else True
            if is_kept:
                map_start = map_ptr + index * (K * K)
                transition = tl.load(map_start + map_offset, mask=is_map, other=0.0)
                state = tl.dot(state, transition, acc=shift, input_precision=PRECISION)
            else:
                # What is not finite is not forgotten.
                state = state * 0.0 + shift
