"""Causal depthwise convolution and SiLU over packed sequences (architecture 3.2 step 1).

Bytes from memory are at the floor (x once, y once): 95 us for 8192 x 12288 bfloat16 at 4.26 TB/s.
A thread keeps 8 channels of a run of RUN tokens and of the W - 1 before it: every value is
loaded once for W taps, 16 bytes at a time and all before the first use. Runs that lie inside one
sequence, nearly all, need no masks. Elsewhere a token finds its sequence by a binary search in
cu_seqlens, so lengths never visit the host, empty sequences cost nothing and rows of the initial
state [N, W - 1, C] are read only where a sequence starts. With NORM a row of the tile is whole
heads, and q, k are divided by sqrt(sum of squares + eps) before the store, which saves a pass.

Legend: T packed tokens, N sequences, C channels, W taps.
"""

import triton
import triton.language as tl

from k3_kernels.tl_math import sigmoid


@triton.jit
def sequence_of(cu_ptr, t, num_sequences, STEPS: tl.constexpr):
    """Index of the sequence that owns token `t` (int64), a scalar or each of a tile."""
    low = t * 0
    high = low + num_sequences
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        is_right = tl.load(cu_ptr + middle).to(tl.int64) <= t
        is_open = high - low > 1
        low = tl.where(is_right & is_open, middle, low)
        high = tl.where(is_right | (high - low <= 1), high, middle)
    return low


@triton.jit
def activated(acc, c, num_norm_channels, eps, NORM: tl.constexpr, HPAD: tl.constexpr):
    """SiLU of a tile [R, C], and the L2 norm by heads of its channels below num_norm_channels."""
    y = acc * sigmoid(acc)
    if NORM:
        heads = y.reshape((y.shape[0], y.shape[1] // HPAD, HPAD))
        scale = tl.rsqrt(tl.sum(heads * heads, axis=2) + eps)
        is_normed = (c < num_norm_channels).reshape((1, y.shape[1] // HPAD, HPAD))
        y = tl.where(is_normed, heads * scale[:, :, None], heads).reshape(y.shape)
    return y


@triton.jit
def conv_kernel(
    x_ptr,
    weight_ptr,
    cu_ptr,
    initial_ptr,
    y_ptr,
    num_tokens,
    num_sequences,
    num_channels,
    num_norm_channels,
    x_stride,
    eps,
    W: tl.constexpr,
    WPAD: tl.constexpr,
    STEPS: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    NORM: tl.constexpr,
    EVEN_C: tl.constexpr,
    HEAD: tl.constexpr,
    HPAD: tl.constexpr,
    RUN: tl.constexpr,
    R: tl.constexpr,
    BC: tl.constexpr,
):
    """y[t] = SiLU(sum_j weight[:, j] x[t - W + 1 + j]); a program makes R runs x BC channels."""
    num_channel_tiles = tl.cdiv(num_channels, BC // HPAD * HEAD)
    tile = tl.program_id(0) % num_channel_tiles
    first = (tl.program_id(0) // num_channel_tiles).to(tl.int64) * (R * RUN)
    at = tl.arange(0, BC)
    # Without padding channels are consecutive, which keeps the accesses wide.
    head = tile * (BC // HPAD) + at // HPAD
    c = tile * BC + at if HEAD == HPAD else head * HEAD + at % HPAD
    if EVEN_C:
        is_channel = tl.full((BC,), True, tl.int1)
    else:
        is_channel = (at % HPAD < HEAD) & (c < num_channels)
    # Before x: the compiler gives all tiles the layout of the last load.
    tap = tl.arange(0, WPAD)[:, None]
    weight_at = weight_ptr + c[None, :] * W + tap
    weight = tl.load(weight_at, mask=(tap < W) & is_channel[None, :], other=0.0).to(tl.float32)
    run = first + tl.arange(0, R) * RUN
    xs: tl.tuple = ()
    for j in tl.static_range(RUN + W - 1):
        t = tl.minimum(tl.maximum(run + (j - W + 1), 0), num_tokens - 1)
        x_at = x_ptr + t[:, None] * x_stride + c[None, :]
        xs += (tl.load(x_at, mask=is_channel[None, :], other=0.0),)
    ws: tl.tuple = ()
    for j in tl.static_range(W):
        ws += (tl.sum(tl.where(tap == j, weight, 0.0), axis=0)[None, :],)
    y_at = y_ptr + run[:, None] * num_channels + c[None, :]
    owner = sequence_of(cu_ptr, first, num_sequences, STEPS)
    start, end = tl.load(cu_ptr + owner).to(tl.int64), tl.load(cu_ptr + owner + 1).to(tl.int64)
    if (start <= first - (W - 1)) & (end >= first + R * RUN):
        for i in tl.static_range(RUN):
            acc = tl.zeros((R, BC), tl.float32)
            for j in tl.static_range(W):
                acc += ws[j] * xs[i + j].to(tl.float32)
            y = activated(acc, c, num_norm_channels, eps, NORM, HPAD)
            out_at = y_at + i * num_channels
            tl.store(out_at, y.to(y_ptr.dtype.element_ty), mask=is_channel[None, :])
    else:
        for i in tl.static_range(RUN):
            is_token = run + i < num_tokens
            t = tl.minimum(run + i, num_tokens - 1)
            sequence = sequence_of(cu_ptr, t, num_sequences, STEPS)
            position = t - tl.load(cu_ptr + sequence).to(tl.int64)
            acc = tl.zeros((R, BC), tl.float32)
            for j in tl.static_range(W):
                is_old = position < W - 1 - j
                x = tl.where(is_old[:, None], 0.0, xs[i + j].to(tl.float32))
                if HAS_INITIAL and j < W - 1:
                    row = sequence * (W - 1) + position + j
                    old_at = initial_ptr + row[:, None] * num_channels + c[None, :]
                    is_read = (is_token & is_old)[:, None] & is_channel[None, :]
                    x += tl.load(old_at, mask=is_read, other=0.0).to(tl.float32)
                # The same taps in the same order as above: a chunked prefill is bit-equal.
                acc += ws[j] * x
            y = activated(acc, c, num_norm_channels, eps, NORM, HPAD)
            out_at = y_at + i * num_channels
            is_out = is_token[:, None] & is_channel[None, :]
            tl.store(out_at, y.to(y_ptr.dtype.element_ty), mask=is_out)


@triton.jit
def final_state_kernel(
    x_ptr,
    cu_ptr,
    initial_ptr,
    final_ptr,
    num_channels,
    x_stride,
    W: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    BC: tl.constexpr,
):
    """The last W - 1 inputs of each sequence, older ones from its initial state."""
    num_channel_tiles = tl.cdiv(num_channels, BC)
    pid = tl.program_id(0)
    n = (pid // num_channel_tiles).to(tl.int64)
    c = (pid % num_channel_tiles) * BC + tl.arange(0, BC)
    is_channel = c < num_channels
    start = tl.load(cu_ptr + n).to(tl.int64)
    length = tl.load(cu_ptr + n + 1).to(tl.int64) - start
    state = (n * num_channels + c) * (W - 1)
    for j in tl.static_range(W - 1):
        position = length - (W - 1) + j
        x_at = x_ptr + (start + position) * x_stride + c
        value = tl.load(x_at, mask=is_channel & (position >= 0), other=0.0).to(tl.float32)
        if HAS_INITIAL:
            is_old = is_channel & (position < 0)
            old = tl.load(initial_ptr + state + position + (W - 1), mask=is_old, other=0.0)
            value = tl.where(position < 0, old.to(tl.float32), value)
        tl.store(final_ptr + state + j, value.to(final_ptr.dtype.element_ty), mask=is_channel)


@triton.jit
def update_kernel(
    x_ptr,
    weight_ptr,
    state_ptr,
    slots_ptr,
    commit_ptr,
    y_ptr,
    num_channels,
    slots_stride,
    num_slots,
    L: tl.constexpr,
    W: tl.constexpr,
    HAS_COMMIT: tl.constexpr,
    BC: tl.constexpr,
    WPAD: tl.constexpr,
):
    """L tokens of one row; the state keeps the window after the first `commit` of them.

    Window and inputs of a channel live in one program, read before anything is written.
    """
    num_channel_tiles = tl.cdiv(num_channels, BC)
    pid = tl.program_id(0)
    row = (pid // num_channel_tiles).to(tl.int64)
    c = (pid % num_channel_tiles) * BC + tl.arange(0, BC)
    is_channel = c < num_channels
    slot = tl.load(slots_ptr + row * slots_stride).to(tl.int64)
    is_live = (slot >= 0) & (slot < num_slots)
    commit = L
    if HAS_COMMIT:
        commit = tl.minimum(tl.maximum(tl.load(commit_ptr + row).to(tl.int32), 0), L)
    tap = tl.arange(0, WPAD)
    state_at = state_ptr + (slot * num_channels + c[:, None]) * (W - 1) + tap[None, :]
    is_state = is_live & is_channel[:, None] & (tap < W - 1)[None, :]
    # Column W - 1 of the window is the current input; the columns before it are the history.
    weight_at = weight_ptr + c[:, None] * W + tap[None, :]
    weight = tl.load(weight_at, mask=is_channel[:, None] & (tap < W)[None, :], other=0.0)
    x_row = x_ptr + row * L * num_channels + c
    for i in tl.static_range(L):
        back = i + tap - (W - 1)
        is_new = is_live & is_channel[:, None] & ((back >= 0) & (tap < W))[None, :]
        new = tl.load(x_row[:, None] + back[None, :] * num_channels, mask=is_new, other=0.0)
        is_old = is_live & is_channel[:, None] & ((back < 0) & (tap < W - 1))[None, :]
        old = tl.load(state_at + i, mask=is_old, other=0.0)
        window = new.to(tl.float32) + old.to(tl.float32)
        acc = tl.sum(window * weight.to(tl.float32), axis=1)
        y = tl.where(is_live, acc * tl.sigmoid(acc), 0.0)
        y_at = y_ptr + (row * L + i) * num_channels + c
        tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=is_channel)
    last = commit + tap - (W - 1)
    is_new = is_state & (last >= 0)[None, :]
    new = tl.load(x_row[:, None] + last[None, :] * num_channels, mask=is_new, other=0.0)
    old = tl.load(state_at + commit, mask=is_state & (last < 0)[None, :], other=0.0)
    kept = new.to(tl.float32) + old.to(tl.float32)
    tl.debug_barrier()
    tl.store(state_at, kept.to(state_ptr.dtype.element_ty), mask=is_state)
