"""KDA decode: gate, L2 norms, beta and the recurrence of W tokens on pooled states, one kernel.

One program owns BV rows of the [V, K] state of one batch row and head, in float32 registers (report
1.1, 1.8). Everything that needs all of K happens inside the program, so V is split freely; what a
block recomputes (gates and norms of K channels) is small beside its state. The state is requested
first, before the loads that it does not depend on.

A verify step (HAS_WRITES) writes no state, but what each token would have written into it.
Legend: B rows, W tokens a row, S slots, H heads, K, V channels.
"""

import triton
import triton.language as tl

from k3_kernels.kda_step.token import advance, decay_of, gate_rate, sigmoid, unit_factor


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
    writes_ptr,
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
    stride_ub,
    stride_uw,
    stride_uh,
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
    HAS_WRITES: tl.constexpr,
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
    rate = gate_rate(tl.load(A_log_ptr + head))
    bias = tl.load(dt_bias_ptr + head * K + channel, mask=is_channel, other=0.0).to(tl.float32)
    q_ptr += batch * stride_qb + head * stride_qh + channel
    k_ptr += batch * stride_kb + head * stride_kh + channel
    gate_ptr += batch * stride_gb + head * stride_gh + channel
    v_ptr += batch * stride_vb + head * stride_vh + value
    beta_ptr += batch * stride_bb + head * stride_bh
    writes_ptr += batch * stride_ub + head * stride_uh + value
    o_ptr += (batch * num_tokens * num_heads + head) * V + value
    for w in range(0, num_tokens):
        q = tl.load(q_ptr + w * stride_qw, mask=is_channel, other=0.0).to(tl.float32)
        k = tl.load(k_ptr + w * stride_kw, mask=is_channel, other=0.0).to(tl.float32)
        gate = tl.load(gate_ptr + w * stride_gw, mask=is_channel, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + w * stride_vw, mask=is_value, other=0.0).to(tl.float32)
        beta = sigmoid(tl.load(beta_ptr + w * stride_bw).to(tl.float32))
        q_factor, k_factor = unit_factor(q) * scale, unit_factor(k)
        kq = tl.sum(k * q, 0) * q_factor * k_factor
        decay = decay_of(gate, bias, rate, lower_bound)
        state, write, o = advance(
            state, q[None, :], k[None, :], v, decay[None, :], beta, q_factor, k_factor, kq
        )
        o = tl.where(is_live, o, 0.0).to(o_ptr.dtype.element_ty)
        tl.store(o_ptr + w * (num_heads * V), o, mask=is_value)
        if HAS_WRITES:
            write = tl.where(is_live, write, 0.0)
            tl.store(writes_ptr + w * stride_uw, write, mask=is_value)
        else:
            tl.store(state_ptr, state, mask=is_state & (w + 1 == num_commit))
