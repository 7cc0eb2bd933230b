"""The causal convolution of decode: its taps at one token, and its paged windows.

Token t - (taps - 1) + j is read from this call's inputs or, before them, from the pool's window, so
that any number of tokens and taps works. A window is written by the program that owns its channels,
after a barrier, since other threads still read the old one before.
Legend: C channels of a program, R = TAPS - 1 inputs of a window, oldest first.
"""

import triton
import triton.language as tl

from k3_kernels.kda_step.token import sigmoid


@triton.jit
def load_inputs(
    x_ptr,
    window_ptr,
    first,
    channel,
    is_channel,
    stride_xw,
    NUM: tl.constexpr,
    TAPS: tl.constexpr,
    BTAPS: tl.constexpr,
):
    """Inputs first .. first + NUM - 1 of each channel, [C, BTAPS] float32; negative ones are old.

    `channel` counts from the pointers.
    """
    tap = tl.arange(0, BTAPS)
    source = first + tap
    is_tap = is_channel[:, None] & (tap < NUM)[None, :]
    new = tl.load(
        x_ptr + source[None, :] * stride_xw + channel[:, None],
        mask=is_tap & (source >= 0)[None, :],
        other=0.0,
    )
    old = tl.load(
        window_ptr + channel[:, None] * (TAPS - 1) + (source + TAPS - 1)[None, :],
        mask=is_tap & (source < 0)[None, :],
        other=0.0,
    )
    return tl.where((source >= 0)[None, :], new.to(tl.float32), old.to(tl.float32))


@triton.jit
def convolve(
    x_ptr,
    window_ptr,
    weight_ptr,
    w,
    channel,
    is_channel,
    stride_xw,
    TAPS: tl.constexpr,
    BTAPS: tl.constexpr,
):
    """SiLU of the convolution at token w, [C] float32; `channel` counts from the pointers."""
    inputs = load_inputs(
        x_ptr, window_ptr, w - (TAPS - 1), channel, is_channel, stride_xw, TAPS, TAPS, BTAPS
    )
    tap = tl.arange(0, BTAPS)
    weight = tl.load(
        weight_ptr + channel[:, None] * TAPS + tap[None, :],
        mask=is_channel[:, None] & (tap < TAPS)[None, :],
        other=0.0,
    )
    y = tl.sum(inputs * weight.to(tl.float32), 1)
    return y * sigmoid(y)


@triton.jit
def move_window(
    x_ptr,
    window_ptr,
    num_tokens,
    channel,
    is_channel,
    stride_xw,
    TAPS: tl.constexpr,
    BTAPS: tl.constexpr,
):
    """The last TAPS - 1 inputs after `num_tokens` tokens, written over the old ones."""
    first = num_tokens - (TAPS - 1)
    kept = load_inputs(
        x_ptr, window_ptr, first, channel, is_channel, stride_xw, TAPS - 1, TAPS, BTAPS
    )
    tap = tl.arange(0, BTAPS)
    tl.debug_barrier()
    tl.store(
        window_ptr + channel[:, None] * (TAPS - 1) + tap[None, :],
        kept.to(window_ptr.dtype.element_ty),
        mask=is_channel[:, None] & (tap < TAPS - 1)[None, :],
    )
