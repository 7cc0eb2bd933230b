"""One token of a KDA layer between its projections, one kernel (report 1.8, 5.4.2).

Convolution update, SiLU, L2 norm, gate, recurrence and gated RMSNorm. One program owns one batch
row and head, because the output norm needs all V and because the head's windows may be moved only
when nobody reads them any more. It walks over the state in blocks of BV rows, so that a program is
small and several share a multiprocessor; two blocks are requested ahead of the one worked on.
All that is small is asked for at once, in tiles of one layout: a change of layouts between two
loads is a barrier, behind which the second waits for the first. The state [BV, J, LANES] has the
J parts of a row in one thread, which takes a third of the exchanges of a row across a warp.
Asking the second-level cache for states before the inputs are there costs 22 us a step of 64 rows.
Legend: B rows, S slots, H heads, K, V channels, C = H (2 K + V) channels of the convolution in the
order q, k, v.
"""

import triton
import triton.language as tl

from k3_kernels.early import wait_for_inputs
from k3_kernels.kda_decode.window import load_taps, load_token, silu_of_sum, store_token
from k3_kernels.kda_step.token import advance, decay_of, gate_rate, sigmoid


@triton.jit
def add_three(a, b, c, d, e, f):
    return a + d, b + e, c + f


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
    LANES: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """x [B, C], window [S, C, TAPS - 1], y [B, H, V] contiguous; WHOLE: power of two
    that holds V. Grid: rows x heads."""
    pid = tl.program_id(0).to(tl.int64)
    head = pid % num_heads
    batch = pid // num_heads
    # Keys [J, LANES], of whose J parts each thread has all; values [blocks, BV].
    part, lane = tl.arange(0, BK // LANES)[:, None], tl.arange(0, LANES)[None, :]
    key = part * LANES + lane
    column = tl.arange(0, WHOLE // BV)[:, None] * BV + tl.arange(0, BV)[None, :]
    is_key, is_value = key < K, column < V
    q_first = head * K
    k_first = (num_heads + head) * K
    v_first = 2 * num_heads * K + head * V
    q_taps = load_taps(weight_ptr + q_first * TAPS, key, is_key, TAPS)
    k_taps = load_taps(weight_ptr + k_first * TAPS, key, is_key, TAPS)
    v_taps = load_taps(weight_ptr + v_first * TAPS, column, is_value, TAPS)
    bias = tl.load(dt_bias_ptr + q_first + key, mask=is_key, other=0.0).to(tl.float32)
    rate = gate_rate(tl.load(A_log_ptr + head))
    norm = tl.load(norm_ptr + column, mask=is_value, other=0.0).to(tl.float32)
    wait_for_inputs(IS_EARLY)

    slot = tl.load(slot_ptr + batch * stride_slot).to(tl.int64)
    is_live = (slot >= 0) & (slot < num_slots)
    value = tl.arange(0, BV)[:, None, None]
    state_ptr += slot * stride_ss + head * stride_sh + value * K + key[None, :, :]
    is_cell = is_key[None, :, :] & is_live
    state = tl.load(state_ptr, mask=is_cell & (value < V), other=0.0)
    following = state
    if NUM_BLOCKS > 1:
        following = tl.load(state_ptr + BV * K, mask=is_cell & (value + BV < V), other=0.0)
    x_ptr += batch * stride_xb
    window_ptr += slot * stride_cs
    q_window, k_window = window_ptr + q_first * (TAPS - 1), window_ptr + k_first * (TAPS - 1)
    v_window = window_ptr + v_first * (TAPS - 1)
    q_inputs = load_token(x_ptr + q_first, q_window, key, is_key, is_live, TAPS)
    k_inputs = load_token(x_ptr + k_first, k_window, key, is_key, is_live, TAPS)
    v_inputs = load_token(x_ptr + v_first, v_window, column, is_value, is_live, TAPS)
    gate_at = gate_ptr + batch * stride_gb + head * stride_gh + key
    gate = tl.load(gate_at, mask=is_key, other=0.0).to(tl.float32)
    beta = tl.load(beta_ptr + batch * stride_bb + head * stride_bh).to(tl.float32)
    out_gate_at = out_gate_ptr + batch * stride_zb + head * stride_zh + column
    out_gate = tl.load(out_gate_at, mask=is_value, other=0.0).to(tl.float32)

    q = silu_of_sum(q_inputs, q_taps, x_ptr, TAPS)
    k = silu_of_sum(k_inputs, k_taps, x_ptr, TAPS)
    v = silu_of_sum(v_inputs, v_taps, x_ptr, TAPS)
    decay = decay_of(gate, bias, rate, lower_bound)[None, :, :]
    beta = sigmoid(beta)
    q_square, k_square, kq = tl.reduce((q * q, k * k, k * q), 1, add_three)
    q_square, k_square, kq = tl.reduce((q_square, k_square, kq), 0, add_three)
    q_factor, k_factor = tl.rsqrt(q_square + 1e-6) * scale, tl.rsqrt(k_square + 1e-6)
    kq *= q_factor * k_factor
    q, k = q[None, :, :], k[None, :, :]
    block, outputs = tl.arange(0, WHOLE // BV), tl.zeros((BV, WHOLE // BV), tl.float32)
    for i in tl.static_range(NUM_BLOCKS):
        own = tl.sum(tl.where(block[:, None] == i, v, 0.0), 0)
        moved, _write, o = advance(state, q, k, own, decay, beta, q_factor, k_factor, kq)
        state = following
        if i + 2 < NUM_BLOCKS:
            is_next = is_cell & (value + (i + 2) * BV < V)
            following = tl.load(state_ptr + (i + 2) * BV * K, mask=is_next, other=0.0)
        tl.store(state_ptr + i * BV * K, moved, mask=is_cell & (value + i * BV < V))
        outputs = tl.where(block[None, :] == i, o[:, None], outputs)

    outputs = tl.trans(outputs)
    squares = tl.sum(tl.sum(tl.where(is_value, outputs * outputs, 0.0), 1), 0)
    y = outputs * tl.rsqrt(squares / V + eps) * norm * sigmoid(out_gate)
    y = tl.where(is_live, y, 0.0).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + pid * V + column, y, mask=is_value)
    # Every thread has read the windows.
    tl.debug_barrier()
    store_token(q_window, q_inputs, key, is_key & is_live, TAPS)
    store_token(k_window, k_inputs, key, is_key & is_live, TAPS)
    store_token(v_window, v_inputs, column, is_value & is_live, TAPS)
