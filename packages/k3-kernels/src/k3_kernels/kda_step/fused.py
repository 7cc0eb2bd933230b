"""The whole of a KDA layer's decode between its projections, one kernel (report 1.8, 5.4.2).

Convolution update, SiLU, L2 norm, gate, recurrence and gated RMSNorm of W tokens. One program owns
one batch row and head, because the output norm needs all V and because the head's windows may be
moved only when nobody reads them any more. It walks over the state in blocks of BV rows, so that a
program is small and several share a multiprocessor; the next block is requested as soon as the
registers of this one are free. Outputs before the norm wait in a float32 scratch tensor.

k is rounded to the dtype of the activations, as between the ops: a replay that starts from the
recorded k then finds the same states.
Legend: B rows, W tokens a row, S slots, H heads, K, V channels, C = H (2 K + V) channels of the
convolution in the order q, k, v.
"""

import triton
import triton.language as tl

from k3_kernels.kda_step.token import advance, decay_of, gate_rate, sigmoid, unit_factor
from k3_kernels.kda_step.window import convolve, move_window


@triton.jit
def _keys(
    q_x_ptr,
    q_window_ptr,
    q_weight_ptr,
    k_x_ptr,
    k_window_ptr,
    k_weight_ptr,
    gate_ptr,
    w,
    bias,
    rate,
    lower_bound,
    channel,
    is_key,
    stride_xw,
    stride_gw,
    TAPS: tl.constexpr,
    BTAPS: tl.constexpr,
):
    """q and k of token w before their norms, and the decay: all [K] float32."""
    q = convolve(q_x_ptr, q_window_ptr, q_weight_ptr, w, channel, is_key, stride_xw, TAPS, BTAPS)
    k = convolve(k_x_ptr, k_window_ptr, k_weight_ptr, w, channel, is_key, stride_xw, TAPS, BTAPS)
    k = k.to(k_x_ptr.dtype.element_ty).to(tl.float32)
    gate = tl.load(gate_ptr + w * stride_gw, mask=is_key, other=0.0).to(tl.float32)
    return q, k, decay_of(gate, bias, rate, lower_bound)


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
    y_ptr,
    scratch_ptr,
    state_ptr,
    window_ptr,
    slot_ptr,
    commit_ptr,
    keys_ptr,
    writes_ptr,
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
    stride_kb,
    stride_kw,
    stride_kh,
    stride_ub,
    stride_uw,
    stride_uh,
    stride_ss,
    stride_sh,
    stride_cs,
    stride_slot,
    stride_commit,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    WHOLE: tl.constexpr,
    TAPS: tl.constexpr,
    BTAPS: tl.constexpr,
    IS_SINGLE: tl.constexpr,
    HAS_COMMIT: tl.constexpr,
    HAS_RECORDS: tl.constexpr,
):
    """x [B, W, C], window [S, C, TAPS - 1], y and scratch [B, W, H, V] contiguous; IS_SINGLE: W is
    1; WHOLE: power of two that holds V. Grid: rows x heads."""
    pid = tl.program_id(0).to(tl.int64)
    head = pid % num_heads
    batch = pid // num_heads
    slot = tl.load(slot_ptr + batch * stride_slot).to(tl.int64)
    is_live = (slot >= 0) & (slot < num_slots)
    channel = tl.arange(0, BK)
    value = tl.arange(0, BV)
    is_key = (channel < K) & is_live
    state_ptr += slot * stride_ss + head * stride_sh + value[:, None] * K + channel[None, :]
    state = tl.load(state_ptr, mask=(value < V)[:, None] & is_key[None, :], other=0.0)

    num_commit = num_tokens
    if HAS_COMMIT:
        num_commit = tl.load(commit_ptr + batch * stride_commit).to(tl.int32)
    if HAS_RECORDS:
        num_commit = 0
    rate = gate_rate(tl.load(A_log_ptr + head))
    bias = tl.load(dt_bias_ptr + head * K + channel, mask=is_key, other=0.0).to(tl.float32)
    q_first = head * K
    k_first = (num_heads + head) * K
    v_first = 2 * num_heads * K + head * V
    x_ptr += batch * stride_xb
    window_ptr += slot * stride_cs
    q_x, k_x, v_x = x_ptr + q_first, x_ptr + k_first, x_ptr + v_first
    q_window = window_ptr + q_first * (TAPS - 1)
    k_window = window_ptr + k_first * (TAPS - 1)
    v_window = window_ptr + v_first * (TAPS - 1)
    q_weight, k_weight = weight_ptr + q_first * TAPS, weight_ptr + k_first * TAPS
    v_weight = weight_ptr + v_first * TAPS
    gate_ptr += batch * stride_gb + head * stride_gh + channel
    beta_ptr += batch * stride_bb + head * stride_bh
    keys_ptr += batch * stride_kb + head * stride_kh + channel
    writes_ptr += batch * stride_ub + head * stride_uh
    row = (batch * num_tokens * num_heads + head) * V
    if IS_SINGLE:
        q, k, decay = _keys(
            q_x,
            q_window,
            q_weight,
            k_x,
            k_window,
            k_weight,
            gate_ptr,
            0,
            bias,
            rate,
            lower_bound,
            channel,
            is_key,
            stride_xw,
            stride_gw,
            TAPS,
            BTAPS,
        )
        q_factor, k_factor = unit_factor(q) * scale, unit_factor(k)
        kq = tl.sum(k * q, 0) * q_factor * k_factor
    for block in range(0, NUM_BLOCKS):
        is_value = (value < V) & is_live
        for w in range(0, num_tokens):
            if not IS_SINGLE:
                q, k, decay = _keys(
                    q_x,
                    q_window,
                    q_weight,
                    k_x,
                    k_window,
                    k_weight,
                    gate_ptr,
                    w,
                    bias,
                    rate,
                    lower_bound,
                    channel,
                    is_key,
                    stride_xw,
                    stride_gw,
                    TAPS,
                    BTAPS,
                )
                q_factor, k_factor = unit_factor(q) * scale, unit_factor(k)
                kq = tl.sum(k * q, 0) * q_factor * k_factor
            v = convolve(v_x, v_window, v_weight, w, value, is_value, stride_xw, TAPS, BTAPS)
            beta = sigmoid(tl.load(beta_ptr + w * stride_bw).to(tl.float32))
            state, write, o = advance(state, q, k, v, decay, beta, q_factor, k_factor, kq)
            tl.store(scratch_ptr + row + w * (num_heads * V) + value, o, mask=is_value)
            if HAS_RECORDS:
                record = k.to(keys_ptr.dtype.element_ty)
                tl.store(keys_ptr + w * stride_kw, record, mask=(channel < K) & (block == 0))
                tl.store(writes_ptr + w * stride_uw + value, write, mask=value < V)
            else:
                is_state = is_value[:, None] & is_key[None, :] & (w + 1 == num_commit)
                tl.store(state_ptr, state, mask=is_state)
        value += BV
        state_ptr += BV * K
        if NUM_BLOCKS > 1:
            state = tl.load(state_ptr, mask=(value < V)[:, None] & is_key[None, :], other=0.0)

    value = tl.arange(0, WHOLE)
    is_value = (value < V) & is_live
    norm = tl.load(norm_ptr + value, mask=is_value, other=0.0).to(tl.float32)
    out_gate_ptr += batch * stride_zb + head * stride_zh + value
    tl.debug_barrier()
    for w in range(0, num_tokens):
        o = tl.load(scratch_ptr + row + w * (num_heads * V) + value, mask=is_value, other=0.0)
        out_gate = tl.load(out_gate_ptr + w * stride_zw, mask=is_value, other=0.0)
        o *= tl.rsqrt(tl.sum(o * o, 0) / V + eps) * norm * sigmoid(out_gate.to(tl.float32))
        y_at = y_ptr + row + w * (num_heads * V) + value
        tl.store(y_at, o.to(y_ptr.dtype.element_ty), mask=value < V)
    if (num_commit > 0) & (num_commit <= num_tokens):
        move_window(q_x, q_window, num_commit, channel, is_key, stride_xw, TAPS, BTAPS)
        move_window(k_x, k_window, num_commit, channel, is_key, stride_xw, TAPS, BTAPS)
        move_window(v_x, v_window, num_commit, value, is_value, stride_xw, TAPS, BTAPS)
