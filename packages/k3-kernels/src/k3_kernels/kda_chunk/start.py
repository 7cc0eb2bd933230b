"""The state that a piece or a part of a sequence starts from (report 1.6)."""

import triton
import triton.language as tl


@triton.jit
def start_state(
    initial_ptr,
    carry_ptr,
    index,
    head_offset,
    state_stride,
    state_offset,
    is_state,
    HAS_INITIAL: tl.constexpr,
    HAS_CARRY: tl.constexpr,
):
    """State `index` of initial_ptr or, for -1 - n, state n of carry_ptr; else zeros.

    head_offset, state_stride: of the head in a state of all heads, and of such a state. float32.
    """
    state = tl.zeros(state_offset.shape, dtype=tl.float32)
    if HAS_INITIAL:
        given = initial_ptr + index * state_stride + head_offset + state_offset
        state = tl.load(given, mask=is_state & (index >= 0), other=0.0)
    if HAS_CARRY:
        carried = carry_ptr + (-1 - index) * state_stride + head_offset + state_offset
        state += tl.load(carried, mask=is_state & (index < 0), other=0.0)
    return state
