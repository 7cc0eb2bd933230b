"""KDA decode: gate, L2 norms, beta and the recurrence of W tokens on pooled states, one kernel.

One program owns BV rows of the [V, K] state of one batch row and head, in float32 registers (report
1.1, 1.8). Everything that needs all of K happens inside the program, so V is split freely; what a
block recomputes (gates and norms of K channels) is small beside its state.

On paper, H200, V = K = 128: reading and writing a state is 128 KiB, 12.6 MB a batch row at H = 96,
2.95 us at the copy rate of 4.26 TB/s. Blocks of 32 rows make 16 KiB programs, 384 a batch row, of
which 8 to 12 fit a multiprocessor: 130 to 190 KiB in flight where 24 KiB cover the latency. The
state is requested first, before the dependent loads of slot-independent inputs.
Legend: B rows, W tokens a row, S slots, H heads, K, V channels.
"""

import triton
import triton.language as tl


@triton.jit
def step_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    gate_ptr,
    beta_ptr,
    A_log_ptr,
    dt_bias_ptr,
    o_ptr,
    state_ptr,
    slot_ptr,
    commit_ptr,
    num_heads,
    num_slots,
    num_tokens,
    lower_bound,
    scale,
    stride_qb,
    stride_qw,
    stride_qh,
    stride_kb,
    stride_kw,
    stride_kh,
    stride_vb,
    stride_vw,
    stride_vh,
    stride_gb,
    stride_gw,
    stride_gh,
    stride_bb,
    stride_bw,
    stride_bh,
    stride_ss,
    stride_sh,
    stride_slot,
    stride_commit,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    HAS_COMMIT: tl.constexpr,
):
    """o is [B, W, H, V] contiguous; a slot outside 0..S-1 reads and writes no state.
    Grid: rows x heads x blocks."""
    pid = tl.program_id(0).to(tl.int64)
    block = pid % NUM_BLOCKS
    head = (pid // NUM_BLOCKS) % num_heads
    batch = pid // NUM_BLOCKS // num_heads
    slot = tl.load(slot_ptr + batch * stride_slot).to(tl.int64)
    is_live = (slot >= 0) & (slot < num_slots)
    channel = tl.arange(0, BK)
    value = block * BV + tl.arange(0, BV)
    is_channel = channel < K
    is_value = value < V
    is_state = is_value[:, None] & is_channel[None, :] & is_live
    state_ptr += slot * stride_ss + head * stride_sh + value[:, None] * K + channel[None, :]
    state = tl.load(state_ptr, mask=is_state, other=0.0)

    num_commit = num_tokens
    if HAS_COMMIT:
        num_commit = tl.load(commit_ptr + batch * stride_commit).to(tl.int32)
    rate = tl.exp2(tl.load(A_log_ptr + head).to(tl.float32) * 1.4426950408889634)
    rate *= -1.4426950408889634
    bias = tl.load(dt_bias_ptr + head * K + channel, mask=is_channel, other=0.0).to(tl.float32)
    q_ptr += batch * stride_qb + head * stride_qh + channel
    k_ptr += batch * stride_kb + head * stride_kh + channel
    gate_ptr += batch * stride_gb + head * stride_gh + channel
    v_ptr += batch * stride_vb + head * stride_vh + value
    beta_ptr += batch * stride_bb + head * stride_bh
    o_ptr += (batch * num_tokens * num_heads + head) * V + value
    for w in range(0, num_tokens):
        q = tl.load(q_ptr + w * stride_qw, mask=is_channel, other=0.0).to(tl.float32)
        k = tl.load(k_ptr + w * stride_kw, mask=is_channel, other=0.0).to(tl.float32)
        gate = tl.load(gate_ptr + w * stride_gw, mask=is_channel, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + w * stride_vw, mask=is_value, other=0.0).to(tl.float32)
        beta = tl.load(beta_ptr + w * stride_bw).to(tl.float32)
        q *= tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * scale
        k *= tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
        g = (lower_bound * 1.4426950408889634) / (1.0 + tl.exp2((gate + bias) * rate))
        beta = 1.0 / (1.0 + tl.exp2(beta * -1.4426950408889634))
        state *= tl.exp2(g)[None, :]
        # Both reads of the decayed state at once: S q after the write is S q + write (k q).
        write = beta * (v - tl.sum(state * k[None, :], 1))
        o = tl.sum(state * q[None, :], 1) + write * tl.sum(k * q, 0)
        o = tl.where(is_live, o, 0.0)
        state += write[:, None] * k[None, :]
        tl.store(o_ptr + w * (num_heads * V), o.to(o_ptr.dtype.element_ty), mask=is_value)
        tl.store(state_ptr, state, mask=is_state & (w + 1 == num_commit))
