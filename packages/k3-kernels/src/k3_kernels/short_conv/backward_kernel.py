"""Backward of the causal depthwise convolution and its SiLU (architecture 3.2 step 1).

Floor: x and dy read, dx written, once each: 142 us for 8192 x 12288 bfloat16 at 4.25 TB/s.
A program walks over RUN tokens of R runs and BC channels. At token t it makes the sum before the
SiLU again from a window of W inputs, then ds = dy SiLU'; ds goes into the W pending gradients
dx[t - b] += w_b ds, of which the oldest is done, and into the weight's sums dw_b += ds x[t - b].
So every value is loaded once but for the 2 (W - 1) tokens before a run, and nothing of the forward
is kept. 29 instructions a value, 100 us; 185 registers; predicted 190 us, measured 294.

A pair (t, b) counts in all three places exactly when t - b lies in the sequence of t. Runs inside
one sequence, nearly all, need no masks. ds of a run gives dx of the tokens from W - 1 before the
run to W - 1 before its end, so that no ds is needed twice; a last run may hold no token at all.
The sums of dw leave as one row a program (`column_sums`).

Legend: T packed tokens, N sequences, C channels, W taps, b tokens back (tap W - 1 - b).
"""

import triton
import triton.language as tl

from k3_kernels.short_conv.kernel import sequence_of
from k3_kernels.tl_math import sigmoid


@triton.jit
def sum_gradient(xs, ws, d_y, W: tl.constexpr):
    """Gradient of the sum before the SiLU; xs and ws by tokens back."""
    acc = ws[0] * xs[0]
    for b in tl.static_range(1, W):
        acc += ws[b] * xs[b]
    gate = sigmoid(acc)
    return d_y * (gate + acc * gate * (1.0 - gate))


@triton.jit
def spread(d_sum, ws, pending, position, IS_MASKED: tl.constexpr, W: tl.constexpr):
    """(gradient of token t - W + 1, pending ones of t, t - 1, ...) after d_sum of token t."""
    following: tl.tuple = ()
    done = ws[0] * d_sum
    for b in tl.static_range(W):
        if b > 0:
            part = ws[b] * d_sum
            if IS_MASKED:
                part = tl.where(position >= b, part, 0.0)
            done = pending[b - 1] + part
        if b < W - 1:
            following += (done,)
    return done, following


@triton.jit
def added(sums, d_sum, xs, W: tl.constexpr):
    """The weight's sums after a token."""
    following: tl.tuple = ()
    for b in tl.static_range(W):
        following += (sums[b] + d_sum * xs[b],)
    return following


@triton.jit
def plain_window(x, past, W: tl.constexpr):
    """Inputs of a token by tokens back, in float32, where all are of its sequence."""
    xs: tl.tuple = (x.to(tl.float32),)
    for b in tl.static_range(1, W):
        xs += (past[b - 1].to(tl.float32),)
    return xs


@triton.jit
def window(x, past, old_at, position, c_mask, C, HAS_INITIAL: tl.constexpr, W: tl.constexpr):
    """Inputs of a token by tokens back: its own, those of its sequence, or the initial state's."""
    xs: tl.tuple = (x,)
    for b in tl.static_range(1, W):
        value = tl.where(position >= b, past[b - 1].to(tl.float32), 0.0)
        if HAS_INITIAL:
            old = position + (W - 1 - b)
            is_old = (position >= 0) & (position < b) & c_mask
            value += tl.load(old_at + old * C, mask=is_old, other=0.0).to(tl.float32)
        xs += (value,)
    return xs


@triton.jit
def shifted(x, past, W: tl.constexpr):
    """The window of past inputs, newest first, after the input x."""
    following: tl.tuple = ()
    for b in tl.static_range(W - 1):
        following += (x if b == 0 else past[b - 1],)
    return following


@triton.jit
def conv_backward_kernel(
    x_ptr,
    weight_ptr,
    cu_ptr,
    initial_ptr,
    d_y_ptr,
    d_final_ptr,
    d_x_ptr,
    partial_ptr,
    num_tokens,
    num_sequences,
    num_channels,
    x_stride,
    d_y_stride,
    W: tl.constexpr,
    STEPS: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    HAS_FINAL: tl.constexpr,
    NEEDS_X: tl.constexpr,
    NEEDS_WEIGHT: tl.constexpr,
    EVEN_C: tl.constexpr,
    RUN: tl.constexpr,
    R: tl.constexpr,
    BC: tl.constexpr,
    UNROLL: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dx [T, C] and the program's sums of dw [P, W, C]; initial and d_final are [N, W - 1, C]."""
    num_channel_tiles = tl.cdiv(num_channels, BC)
    block = tl.program_id(0) // num_channel_tiles
    first = block.to(tl.int64) * (R * RUN)
    c = (tl.program_id(0) % num_channel_tiles) * BC + tl.arange(0, BC)[None, :]
    c_mask = tl.full((1, BC), True, tl.int1) if EVEN_C else c < num_channels
    ws: tl.tuple = ()
    for b in tl.static_range(W):
        ws += (tl.load(weight_ptr + c * W + (W - 1 - b), mask=c_mask, other=0.0).to(tl.float32),)
    run = first + tl.arange(0, R)[:, None] * RUN
    past: tl.tuple = ()
    pending: tl.tuple = ()
    for b in tl.static_range(1, W):
        t = tl.minimum(tl.maximum(run - (W - 1 + b), 0), num_tokens - 1)
        past += (tl.load(x_ptr + t * x_stride + c, mask=c_mask, other=0.0),)
        pending += (tl.zeros((R, BC), tl.float32),)
    sums: tl.tuple = ()
    for _b in tl.static_range(W):
        sums += (tl.zeros((R, BC), tl.float32),)
    owner = sequence_of(cu_ptr, tl.minimum(first, num_tokens - 1), num_sequences, STEPS)
    start, end = tl.load(cu_ptr + owner).to(tl.int64), tl.load(cu_ptr + owner + 1).to(tl.int64)
    if (start <= first - 2 * (W - 1)) & (end >= first + R * RUN):
        for i in tl.static_range(W - 1):
            t = run + (i - W + 1)
            x = tl.load(x_ptr + t * x_stride + c, mask=c_mask, other=0.0)
            d_y = tl.load(d_y_ptr + t * d_y_stride + c, mask=c_mask, other=0.0).to(tl.float32)
            d_sum = sum_gradient(plain_window(x, past, W), ws, d_y, W)
            _done, pending = spread(d_sum, ws, pending, 0, False, W)
            past = shifted(x, past, W)
        for i in tl.range(0, RUN, UNROLL, num_stages=STAGES):
            new: tl.tuple = ()
            for u in tl.static_range(UNROLL):
                t = run + (i + u)
                x = tl.load(x_ptr + t * x_stride + c, mask=c_mask, other=0.0)
                new += ((x, tl.load(d_y_ptr + t * d_y_stride + c, mask=c_mask, other=0.0)),)
            for u in tl.static_range(UNROLL):
                xs = plain_window(new[u][0], past, W)
                d_sum = sum_gradient(xs, ws, new[u][1].to(tl.float32), W)
                done, pending = spread(d_sum, ws, pending, 0, False, W)
                sums = added(sums, d_sum, xs, W)
                past = shifted(new[u][0], past, W)
                if NEEDS_X:
                    at = d_x_ptr + (run + (i + u - W + 1)) * num_channels + c
                    tl.store(at, done.to(d_x_ptr.dtype.element_ty), mask=c_mask)
    else:
        t = run - (W - 1)
        mask = (t >= 0) & (t < num_tokens) & c_mask
        next_x = tl.load(x_ptr + t * x_stride + c, mask=mask, other=0.0)
        next_d_y = tl.load(d_y_ptr + t * d_y_stride + c, mask=mask, other=0.0)
        for i in range(-(W - 1), RUN):
            t = run + i
            is_token = (t >= 0) & (t < num_tokens)
            x, d_y = next_x, next_d_y.to(tl.float32)
            # Of the next token, before the search that this one waits for.
            mask = (t >= -1) & (t + 1 < num_tokens) & (i + 1 < RUN) & c_mask
            next_x = tl.load(x_ptr + (t + 1) * x_stride + c, mask=mask, other=0.0)
            next_d_y = tl.load(d_y_ptr + (t + 1) * d_y_stride + c, mask=mask, other=0.0)
            sequence = sequence_of(cu_ptr, tl.where(is_token, t, 0), num_sequences, STEPS)
            position = tl.where(is_token, t - tl.load(cu_ptr + sequence).to(tl.int64), -1)
            old_at = initial_ptr + sequence * (W - 1) * num_channels + c
            wide = x.to(tl.float32)
            xs = window(wide, past, old_at, position, c_mask, num_channels, HAS_INITIAL, W)
            d_sum = sum_gradient(xs, ws, d_y, W)
            done, pending = spread(d_sum, ws, pending, position, True, W)
            past = shifted(x, past, W)
            sums = added(sums, tl.where(i >= 0, d_sum, 0.0), xs, W)
            if NEEDS_X:
                u = t - (W - 1)
                is_out = (i >= 0) & (u >= 0) & (u < num_tokens)
                if HAS_FINAL:
                    sequence = sequence_of(cu_ptr, tl.where(is_out, u, 0), num_sequences, STEPS)
                    kept = u - tl.load(cu_ptr + sequence + 1).to(tl.int64) + (W - 1)
                    at = d_final_ptr + (sequence * (W - 1) + kept) * num_channels + c
                    is_kept = is_out & (kept >= 0) & c_mask
                    done += tl.load(at, mask=is_kept, other=0.0).to(tl.float32)
                at = d_x_ptr + u * num_channels + c
                tl.store(at, done.to(d_x_ptr.dtype.element_ty), mask=is_out & c_mask)
    if NEEDS_WEIGHT:
        for b in tl.static_range(W):
            at = partial_ptr + (block.to(tl.int64) * W + (W - 1 - b)) * num_channels + c
            tl.store(at, tl.sum(sums[b], axis=0)[None, :], mask=c_mask)


@triton.jit
def initial_backward_kernel(
    x_ptr,
    weight_ptr,
    cu_ptr,
    initial_ptr,
    d_y_ptr,
    d_final_ptr,
    d_initial_ptr,
    num_channels,
    x_stride,
    d_y_stride,
    W: tl.constexpr,
    HAS_FINAL: tl.constexpr,
    BC: tl.constexpr,
):
    """d_initial [N, C, W - 1] from the first W - 1 tokens of a sequence, and from d_final where
    the sequence is shorter than that; initial and d_final are [N, W - 1, C]."""
    num_channel_tiles = tl.cdiv(num_channels, BC)
    n = (tl.program_id(0) // num_channel_tiles).to(tl.int64)
    c = (tl.program_id(0) % num_channel_tiles) * BC + tl.arange(0, BC)
    c_mask = c < num_channels
    start = tl.load(cu_ptr + n).to(tl.int64)
    length = tl.load(cu_ptr + n + 1).to(tl.int64) - start
    ws: tl.tuple = ()
    past: tl.tuple = ()
    for b in tl.static_range(W):
        ws += (tl.load(weight_ptr + c * W + (W - 1 - b), mask=c_mask, other=0.0).to(tl.float32),)
    for b in tl.static_range(1, W):
        at = initial_ptr + (n * (W - 1) + (W - 1 - b)) * num_channels + c
        past += (tl.load(at, mask=c_mask, other=0.0).to(tl.float32),)
    d_sums: tl.tuple = ()
    for p in tl.static_range(W - 1):
        t, mask = start + p, c_mask & (p < length)
        x = tl.load(x_ptr + t * x_stride + c, mask=mask, other=0.0).to(tl.float32)
        d_y = tl.load(d_y_ptr + t * d_y_stride + c, mask=mask, other=0.0).to(tl.float32)
        xs: tl.tuple = (x,)
        for b in tl.static_range(1, W):
            xs += (past[b - 1],)
        d_sums += (sum_gradient(xs, ws, d_y, W),)
        past = shifted(x, past, W)
    for k in tl.static_range(W - 1):
        total = tl.zeros((BC,), tl.float32)
        if HAS_FINAL:
            at = d_final_ptr + (n * (W - 1) + k - length) * num_channels + c
            total += tl.load(at, mask=c_mask & (k >= length), other=0.0).to(tl.float32)
        for p in tl.static_range(k + 1):
            total += tl.where(p < length, d_sums[p] * ws[W - 1 + p - k], 0.0)
        at = d_initial_ptr + (n * num_channels + c) * (W - 1) + k
        tl.store(at, total.to(d_initial_ptr.dtype.element_ty), mask=c_mask)
