"""Accepted tokens applied to pooled states and convolution windows (report 1.8).

The state of a verified token needs no reads: decay it, add the recorded write. Blocks of value
channels are independent, tokens are applied in order, so that the result is that of the decode
kernel to the last rounding. A row without accepted tokens loads nothing.
Legend: B rows, W tokens a row, S slots, H heads, K, V channels, C channels of the convolution.
"""

import triton
import triton.language as tl

from k3_kernels.kda_decode.window import move_window
from k3_kernels.kda_step.token import add_write, decay_of, gate_rate, unit_factor


@triton.jit
def accepted_tokens(slot, accepted_ptr, batch, stride_accepted, num_slots, num_tokens):
    """Tokens to apply: none for a slot or a count that is out of range."""
    count = tl.load(accepted_ptr + batch * stride_accepted).to(tl.int32)
    is_good = (slot >= 0) & (slot < num_slots) & (count <= num_tokens)
    return tl.where(is_good, count, 0)


@triton.jit
def replay_kernel(
    k_ptr,
    gate_ptr,
    writes_ptr,
    A_log_ptr,
    dt_bias_ptr,
    state_ptr,
    slot_ptr,
    accepted_ptr,
    num_heads,
    num_slots,
    num_tokens,
    lower_bound,
    stride_kb,
    stride_kw,
    stride_kh,
    stride_gb,
    stride_gw,
    stride_gh,
    stride_ub,
    stride_uw,
    stride_uh,
    stride_ss,
    stride_sh,
    stride_slot,
    stride_accepted,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
):
    """state [S, H, V, K]; grid: rows x heads x blocks."""
    pid = tl.program_id(0).to(tl.int64)
    block = pid % NUM_BLOCKS
    head = (pid // NUM_BLOCKS) % num_heads
    batch = pid // NUM_BLOCKS // num_heads
    slot = tl.load(slot_ptr + batch * stride_slot).to(tl.int64)
    count = accepted_tokens(slot, accepted_ptr, batch, stride_accepted, num_slots, num_tokens)
    if count > 0:
        channel = tl.arange(0, BK)
        value = block * BV + tl.arange(0, BV)
        is_channel = channel < K
        is_value = value < V
        is_state = is_value[:, None] & is_channel[None, :]
        state_at = slot * stride_ss + head * stride_sh + value[:, None] * K + channel[None, :]
        state = tl.load(state_ptr + state_at, mask=is_state, other=0.0)
        rate = gate_rate(tl.load(A_log_ptr + head))
        bias = tl.load(dt_bias_ptr + head * K + channel, mask=is_channel, other=0.0).to(tl.float32)
        k_at = k_ptr + batch * stride_kb + head * stride_kh + channel
        gate_at = gate_ptr + batch * stride_gb + head * stride_gh + channel
        write_at = writes_ptr + batch * stride_ub + head * stride_uh + value
        for w in range(0, count):
            k = tl.load(k_at + w * stride_kw, mask=is_channel, other=0.0).to(tl.float32)
            gate = tl.load(gate_at + w * stride_gw, mask=is_channel, other=0.0).to(tl.float32)
            write = tl.load(write_at + w * stride_uw, mask=is_value, other=0.0)
            state *= decay_of(gate, bias, rate, lower_bound)[None, :]
            state = add_write(state, write, k[None, :], unit_factor(k))
        tl.store(state_ptr + state_at, state, mask=is_state)


@triton.jit
def window_kernel(
    x_ptr,
    window_ptr,
    slot_ptr,
    accepted_ptr,
    num_channels,
    num_slots,
    num_tokens,
    stride_xb,
    stride_xw,
    stride_cs,
    stride_slot,
    stride_accepted,
    TAPS: tl.constexpr,
    BTAPS: tl.constexpr,
    BC: tl.constexpr,
):
    """x [B, W, C], window [S, C, TAPS - 1]; grid: rows x channel tiles."""
    num_tiles = tl.cdiv(num_channels, BC)
    pid = tl.program_id(0).to(tl.int64)
    batch = pid // num_tiles
    channel = (pid % num_tiles) * BC + tl.arange(0, BC)
    slot = tl.load(slot_ptr + batch * stride_slot).to(tl.int64)
    count = accepted_tokens(slot, accepted_ptr, batch, stride_accepted, num_slots, num_tokens)
    if count > 0:
        move_window(
            x_ptr + batch * stride_xb,
            window_ptr + slot * stride_cs,
            count,
            channel,
            channel < num_channels,
            stride_xw,
            TAPS,
            BTAPS,
        )
