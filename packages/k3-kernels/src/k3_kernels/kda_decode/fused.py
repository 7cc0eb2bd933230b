"""One token of a KDA layer between its projections, one kernel (report 1.8, 5.4.2).

Convolution update, SiLU, L2 norm, gate, recurrence and gated RMSNorm. One program owns one batch
row and head, because the output norm needs all V and because the head's windows may be moved only
when nobody reads them any more. It walks over the state in blocks of BV rows, so that a program is
small and several share a multiprocessor; the next block is requested before this one is worked on.
Asking the second-level cache for states before the inputs are there costs 22 us a step of 64 rows.
Legend: B rows, S slots, H heads, K, V channels, C = H (2 K + V) channels of the convolution in the
order q, k, v.
"""

import triton
import triton.language as tl

from k3_kernels.early import wait_for_inputs
from k3_kernels.kda_decode.window import convolve, move_window
from k3_kernels.kda_step.token import advance, decay_of, gate_rate, sigmoid, unit_factor


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
    state_ptr,
    window_ptr,
    slot_ptr,
    num_heads,
    num_slots,
    lower_bound,
    scale,
    eps,
    stride_xb,
    stride_gb,
    stride_gh,
    stride_bb,
    stride_bh,
    stride_zb,
    stride_zh,
    stride_ss,
    stride_sh,
    stride_cs,
    stride_slot,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    WHOLE: tl.constexpr,
    TAPS: tl.constexpr,
    BTAPS: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """x [B, C], window [S, C, TAPS - 1], y [B, H, V] contiguous; WHOLE: power of two
    that holds V. Grid: rows x heads."""
    pid = tl.program_id(0).to(tl.int64)
    head = pid % num_heads
    batch = pid // num_heads
    wait_for_inputs(IS_EARLY)
    slot = tl.load(slot_ptr + batch * stride_slot).to(tl.int64)
    is_live = (slot >= 0) & (slot < num_slots)
    channel = tl.arange(0, BK)
    value = tl.arange(0, BV)
    is_key = (channel < K) & is_live
    state_ptr += slot * stride_ss + head * stride_sh + value[:, None] * K + channel[None, :]
    state = tl.load(state_ptr, mask=(value < V)[:, None] & is_key[None, :], other=0.0)

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
    whole = tl.arange(0, WHOLE)
    is_value = (whole < V) & is_live
    q = convolve(q_x, q_window, q_weight, 0, channel, is_key, 0, TAPS, BTAPS)
    k = convolve(k_x, k_window, k_weight, 0, channel, is_key, 0, TAPS, BTAPS)
    v = convolve(v_x, v_window, v_weight, 0, whole, is_value, 0, TAPS, BTAPS)
    gate_ptr += batch * stride_gb + head * stride_gh + channel
    gate = tl.load(gate_ptr, mask=is_key, other=0.0).to(tl.float32)
    bias = tl.load(dt_bias_ptr + head * K + channel, mask=is_key, other=0.0).to(tl.float32)
    decay = decay_of(gate, bias, gate_rate(tl.load(A_log_ptr + head)), lower_bound)
    beta = sigmoid(tl.load(beta_ptr + batch * stride_bb + head * stride_bh).to(tl.float32))
    q_factor, k_factor = unit_factor(q) * scale, unit_factor(k)
    kq = tl.sum(k * q, 0) * q_factor * k_factor
    outputs = tl.zeros((WHOLE,), tl.float32)
    for i in tl.static_range(NUM_BLOCKS):
        is_own = (value < V)[:, None] & is_key[None, :]
        if i + 1 < NUM_BLOCKS:
            is_next = (value + BV < V)[:, None] & is_key[None, :]
            following = tl.load(state_ptr + BV * K, mask=is_next, other=0.0)
        own = tl.gather(v, value, 0)
        state, _write, o = advance(state, q, k, own, decay, beta, q_factor, k_factor, kq)
        tl.store(state_ptr, state, mask=is_own)
        outputs = tl.where(whole // BV == i, tl.gather(o, whole % BV, 0), outputs)
        state_ptr += BV * K
        value += BV
        if i + 1 < NUM_BLOCKS:
            state = following

    norm = tl.load(norm_ptr + whole, mask=is_value, other=0.0).to(tl.float32)
    out_gate_ptr += batch * stride_zb + head * stride_zh + whole
    out_gate = tl.load(out_gate_ptr, mask=is_value, other=0.0).to(tl.float32)
    squares = tl.sum(tl.where(is_value, outputs * outputs, 0.0), 0)
    y = outputs * tl.rsqrt(squares / V + eps) * norm * sigmoid(out_gate)
    tl.store(y_ptr + pid * V + whole, y.to(y_ptr.dtype.element_ty), mask=whole < V)
    move_window(q_x, q_window, 1, channel, is_key, 0, TAPS, BTAPS)
    move_window(k_x, k_window, 1, channel, is_key, 0, TAPS, BTAPS)
    move_window(v_x, v_window, 1, whole, is_value, 0, TAPS, BTAPS)
