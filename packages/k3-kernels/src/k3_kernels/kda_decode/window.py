"""The causal convolution of decode: its taps at one token, its paged windows, and its kernel.

Token t - (taps - 1) + j is read from this call's inputs or, before them, from the pool's window, so
that any number of tokens and taps works. A window is written by the program that owns its channels,
after a barrier, since other threads still read the old one before.
Legend: B rows, W tokens a row, S slots, C channels; a window is TAPS - 1 inputs, oldest first.
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
def load_taps(weight_ptr, channel, is_channel, TAPS: tl.constexpr):
    """The weights of each tap, for channels of any shape, which count from the pointer."""
    taps = ()
    for tap in tl.static_range(TAPS):
        weight = tl.load(weight_ptr + channel * TAPS + tap, mask=is_channel, other=0.0)
        taps += (weight.to(tl.float32),)  # type: ignore[assignment]
    return taps


@triton.jit
def load_token(x_ptr, window_ptr, channel, is_channel, is_live, TAPS: tl.constexpr):
    """The inputs of one token, those of the window (zeros where it is not live) before its own.

    Each has the shape of `channel`, so that all loads have one layout and none waits for another.
    """
    inputs = ()
    # First, from which triton 3.6 takes the layout of all: otherwise the loop over a state changes
    # layouts (87 barriers, not 24).
    own = tl.load(x_ptr + channel, mask=is_channel, other=0.0)
    for tap in tl.static_range(TAPS - 1):
        at = window_ptr + channel * (TAPS - 1) + tap
        inputs += (tl.load(at, mask=is_channel & is_live, other=0.0),)  # type: ignore[assignment]
    inputs += (own,)  # type: ignore[assignment]
    return inputs


@triton.jit
def store_token(window_ptr, inputs, channel, is_channel, TAPS: tl.constexpr):
    """The window after the token of `load_token`; behind a barrier, since others may load it."""
    for tap in tl.static_range(TAPS - 1):
        at = window_ptr + channel * (TAPS - 1) + tap
        tl.store(at, inputs[tap + 1].to(window_ptr.dtype.element_ty), mask=is_channel)


@triton.jit
def silu_of_sum(inputs, taps, x_ptr, TAPS: tl.constexpr):
    """SiLU of the convolution in float32, rounded to the dtype of the inputs, as the op's result
    is: q, k and v are then the same however many tokens a call has, and a replay from recorded k
    finds the same states."""
    y = inputs[0].to(tl.float32) * taps[0]
    for tap in tl.static_range(1, TAPS):
        y += inputs[tap].to(tl.float32) * taps[tap]
    return (y * sigmoid(y)).to(x_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def convolve(x_ptr, window_ptr, taps, w, channel, is_channel, stride_xw, TAPS: tl.constexpr):
    """`silu_of_sum` at token w of a call; `channel` counts from the pointers."""
    inputs = ()
    for tap in tl.static_range(TAPS):
        source = w - (TAPS - 1) + tap
        new_at, old_at = x_ptr + source * stride_xw + channel, channel * (TAPS - 1) + w + tap
        new = tl.load(new_at, mask=is_channel & (source >= 0), other=0.0)
        old = tl.load(window_ptr + old_at, mask=is_channel & (source < 0), other=0.0)
        inputs += (tl.where(source >= 0, new.to(tl.float32), old.to(tl.float32)),)  # type: ignore[assignment]
    return silu_of_sum(inputs, taps, x_ptr, TAPS)


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


@triton.jit
def conv_kernel(
    x_ptr,
    weight_ptr,
    y_ptr,
    keys_ptr,
    window_ptr,
    slot_ptr,
    commit_ptr,
    num_channels,
    num_slots,
    num_tokens,
    first_key,
    stride_xb,
    stride_xw,
    stride_kb,
    stride_kw,
    stride_kh,
    stride_cs,
    stride_slot,
    stride_commit,
    K: tl.constexpr,
    TAPS: tl.constexpr,
    BTAPS: tl.constexpr,
    BC: tl.constexpr,
    HAS_COMMIT: tl.constexpr,
    HAS_KEYS: tl.constexpr,
):
    """x [B, W, C], y [B, W, C] contiguous, window [S, C, TAPS - 1]. Grid: rows x channel tiles.

    Windows are moved by the committed tokens. HAS_KEYS: by none, and the channels of k, H K from
    `first_key` on, are stored once more as keys [B, W, H, K].
    """
    num_tiles = tl.cdiv(num_channels, BC)
    pid = tl.program_id(0).to(tl.int64)
    batch = pid // num_tiles
    channel = (pid % num_tiles) * BC + tl.arange(0, BC)
    slot = tl.load(slot_ptr + batch * stride_slot).to(tl.int64)
    is_channel = (channel < num_channels) & (slot >= 0) & (slot < num_slots)
    num_commit = num_tokens
    if HAS_COMMIT:
        num_commit = tl.load(commit_ptr + batch * stride_commit).to(tl.int32)
    x_ptr += batch * stride_xb
    window_ptr += slot * stride_cs
    y_ptr += batch * num_tokens * num_channels + channel
    key = channel - first_key
    is_key = (key >= 0) & (key < first_key)
    keys_ptr += batch * stride_kb + key // K * stride_kh + key % K
    taps = load_taps(weight_ptr, channel, is_channel, TAPS)
    for w in range(0, num_tokens):
        y = convolve(x_ptr, window_ptr, taps, w, channel, is_channel, stride_xw, TAPS)
        y = y.to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + w * num_channels, y, mask=channel < num_channels)
        if HAS_KEYS:
            tl.store(keys_ptr + w * stride_kw, y, mask=is_key)
    if not HAS_KEYS:
        is_moved = is_channel & (num_commit > 0) & (num_commit <= num_tokens)
        move_window(x_ptr, window_ptr, num_commit, channel, is_moved, stride_xw, TAPS, BTAPS)
