"""The whole of a KDA layer's decode between its projections, one kernel (report 1.8, 5.4.2).

Convolution update, SiLU, L2 norm, gate, recurrence and gated RMSNorm of W tokens. One program owns
the whole [V, K] state of a batch row and head, because the output norm needs all V. The convolution
reads token t - (taps - 1) + j from this call's inputs or, before them, from the pool's window, so
that any number of tokens and taps works; the window of the committed tokens is written last, after
a barrier, since other threads still read the old one before.

On paper, H200: 64 KiB in and out a program at V = K = 128, 8 warps of 64 state values a thread, two
or three programs a multiprocessor. Against the unfused sequence it saves four launches and the
round trips of q, k, v and o; at one row and 96 heads the state itself is 3 us.
Legend: B rows, W tokens a row, S slots, H heads, K, V channels, C = H (2 K + V) channels of the
convolution in the order q, k, v.
"""

import triton
import triton.language as tl


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp2(x * -1.4426950408889634))


@triton.jit
def _convolve(
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
    """SiLU of the convolution at token w; `channel` counts from the three pointers."""
    tap = tl.arange(0, BTAPS)
    source = w - (TAPS - 1) + tap
    is_tap = is_channel[:, None] & (tap < TAPS)[None, :]
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
    weight = tl.load(weight_ptr + channel[:, None] * TAPS + tap[None, :], mask=is_tap, other=0.0)
    taps = (new.to(tl.float32) + old.to(tl.float32)) * weight.to(tl.float32)
    y = tl.sum(taps, 1)
    return y * _sigmoid(y)


@triton.jit
def _advance_window(
    x_ptr,
    window_ptr,
    num_commit,
    channel,
    is_channel,
    stride_xw,
    TAPS: tl.constexpr,
    BTAPS: tl.constexpr,
):
    """The last TAPS - 1 inputs after `num_commit` tokens, written over the old ones."""
    slot = tl.arange(0, BTAPS)
    source = num_commit - (TAPS - 1) + slot
    is_tap = is_channel[:, None] & (slot < TAPS - 1)[None, :]
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
    kept = tl.where((source >= 0)[None, :], new.to(tl.float32), old.to(tl.float32))
    tl.debug_barrier()
    tl.store(
        window_ptr + channel[:, None] * (TAPS - 1) + slot[None, :],
        kept.to(window_ptr.dtype.element_ty),
        mask=is_tap,
    )


@triton.jit
def decode_kernel(
    x_ptr,
    weight_ptr,
    gate_ptr,
    beta_ptr,
    A_log_ptr,
    dt_bias_ptr,
    out_gate_ptr,
    norm_ptr,
    o_ptr,
    state_ptr,
    window_ptr,
    slot_ptr,
    commit_ptr,
    num_heads,
    num_slots,
    num_tokens,
    lower_bound,
    scale,
    eps,
    stride_xb,
    stride_xw,
    stride_gb,
    stride_gw,
    stride_gh,
    stride_bb,
    stride_bw,
    stride_bh,
    stride_zb,
    stride_zw,
    stride_zh,
    stride_ss,
    stride_sh,
    stride_cs,
    stride_slot,
    stride_commit,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    TAPS: tl.constexpr,
    BTAPS: tl.constexpr,
    HAS_COMMIT: tl.constexpr,
):
    """x [B, W, C], window [S, C, TAPS - 1], o [B, W, H, V] contiguous. Grid: rows x heads."""
    pid = tl.program_id(0).to(tl.int64)
    head = pid % num_heads
    batch = pid // num_heads
    slot = tl.load(slot_ptr + batch * stride_slot).to(tl.int64)
    is_live = (slot >= 0) & (slot < num_slots)
    channel = tl.arange(0, BK)
    value = tl.arange(0, BV)
    is_key = (channel < K) & is_live
    is_value = (value < V) & is_live
    is_state = is_value[:, None] & is_key[None, :]
    state_ptr += slot * stride_ss + head * stride_sh + value[:, None] * K + channel[None, :]
    state = tl.load(state_ptr, mask=is_state, other=0.0)

    num_commit = num_tokens
    if HAS_COMMIT:
        num_commit = tl.load(commit_ptr + batch * stride_commit).to(tl.int32)
    rate = tl.exp2(tl.load(A_log_ptr + head).to(tl.float32) * 1.4426950408889634)
    rate *= -1.4426950408889634
    bias = tl.load(dt_bias_ptr + head * K + channel, mask=is_key, other=0.0).to(tl.float32)
    norm = tl.load(norm_ptr + value, mask=is_value, other=0.0).to(tl.float32)
    q_first = head * K
    k_first = (num_heads + head) * K
    v_first = 2 * num_heads * K + head * V
    x_ptr += batch * stride_xb
    window_ptr += slot * stride_cs
    gate_ptr += batch * stride_gb + head * stride_gh + channel
    beta_ptr += batch * stride_bb + head * stride_bh
    out_gate_ptr += batch * stride_zb + head * stride_zh + value
    o_ptr += (batch * num_tokens * num_heads + head) * V + value
    for w in range(0, num_tokens):
        q = _convolve(
            x_ptr + q_first,
            window_ptr + q_first * (TAPS - 1),
            weight_ptr + q_first * TAPS,
            w,
            channel,
            is_key,
            stride_xw,
            TAPS,
            BTAPS,
        )
        k = _convolve(
            x_ptr + k_first,
            window_ptr + k_first * (TAPS - 1),
            weight_ptr + k_first * TAPS,
            w,
            channel,
            is_key,
            stride_xw,
            TAPS,
            BTAPS,
        )
        v = _convolve(
            x_ptr + v_first,
            window_ptr + v_first * (TAPS - 1),
            weight_ptr + v_first * TAPS,
            w,
            value,
            is_value,
            stride_xw,
            TAPS,
            BTAPS,
        )
        gate = tl.load(gate_ptr + w * stride_gw, mask=is_key, other=0.0).to(tl.float32)
        beta = _sigmoid(tl.load(beta_ptr + w * stride_bw).to(tl.float32))
        q *= tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * scale
        k *= tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
        g = (lower_bound * 1.4426950408889634) / (1.0 + tl.exp2((gate + bias) * rate))
        state *= tl.exp2(g)[None, :]
        write = beta * (v - tl.sum(state * k[None, :], 1))
        o = tl.sum(state * q[None, :], 1) + write * tl.sum(k * q, 0)
        state += write[:, None] * k[None, :]
        out_gate = tl.load(out_gate_ptr + w * stride_zw, mask=is_value, other=0.0)
        o *= tl.rsqrt(tl.sum(o * o, 0) / V + eps) * norm * _sigmoid(out_gate.to(tl.float32))
        o = tl.where(is_live, o, 0.0)
        tl.store(o_ptr + w * (num_heads * V), o.to(o_ptr.dtype.element_ty), mask=value < V)
        tl.store(state_ptr, state, mask=is_state & (w + 1 == num_commit))

    if num_commit > num_tokens:
        num_commit = 0  # nothing is committed, so the window stays as the state does
    if num_commit > 0:
        _advance_window(
            x_ptr + q_first,
            window_ptr + q_first * (TAPS - 1),
            num_commit,
            channel,
            is_key,
            stride_xw,
            TAPS,
            BTAPS,
        )
        _advance_window(
            x_ptr + k_first,
            window_ptr + k_first * (TAPS - 1),
            num_commit,
            channel,
            is_key,
            stride_xw,
            TAPS,
            BTAPS,
        )
        _advance_window(
            x_ptr + v_first,
            window_ptr + v_first * (TAPS - 1),
            num_commit,
            value,
            is_value,
            stride_xw,
            TAPS,
            BTAPS,
        )
