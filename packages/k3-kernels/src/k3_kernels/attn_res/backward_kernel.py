"""Backward of attention over depth and of the sum and the norm around it (report 3.1).

With r_i the factor that normalises v_i, s_i its score and w_i its weight, mix = sum w_i v_i and
dmix its gradient: ds_i = w_i (dmix . v_i - dmix . mix), q = norm * proj,
dv_i = w_i dmix + ds_i r_i (q - v_i s_i r_i / D), dq = sum ds_i r_i v_i.
The forward keeps s, r and the log-sum-exp, 76 bytes a token of 9 sources. With an output norm
dmix needs the whole mix first, so a token reads its sources twice: to make the mix again, then,
last source first, for the gradients. The second read finds 14 KB rows of 132 programs in the L2.

Floor: the sources and dout read, the gradients written, 19 rows or 525 us for 9 sources of
8192 x 7168 bfloat16 at 4.25 TB/s. All rows that a program reads, of both passes and of all its
tokens, are one stream of asynchronous copies: with a loop for each pass it would drain 18 times a
token. 12 instructions a value of a source, 40% of that time. Measured 1330 us with 16 warps, 1110
with 8: a step waits for its reduction and barriers, not for memory. On a Hopper GPU gluon.py runs.

Legend: T tokens, D model width, n sources, P programs.
"""

import triton
import triton.language as tl

from k3_kernels.attn_res.kernel import add_pairs, source_address
from k3_kernels.column_sums import column_total

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def row_of_step(k, NUM_SOURCES: tl.constexpr, NUM_STEPS: tl.constexpr):
    """Which row step `k` of a token reads: 0 d_out, 1 d_sum, then the sources.

    Steps: d_out, sources upwards, d_sum where there is one, sources downwards.
    """
    source = tl.where(k <= NUM_SOURCES, k - 1, NUM_STEPS - 1 - k)
    is_sum = (k > NUM_SOURCES) & (source == NUM_SOURCES)
    return tl.where(k == 0, 0, tl.where(is_sum, 1, source + 2))


@triton.jit
def norm_backward(d_out, mix, weight, d_weight, eps, D: tl.constexpr):
    """(d_mix, d_mix . mix, d_weight) through weight * mix / sqrt(mean(mix^2) + eps)."""
    scaled = d_out * weight
    dot, square = tl.reduce((scaled * mix, mix * mix), 0, add_pairs)
    r = tl.rsqrt(square / D + eps)
    # The norm leaves of the radial part only what eps makes of it.
    mean = dot * r * r * r * eps
    return r * (scaled - mix * (dot * r * r / D)), mean, d_weight + d_out * mix * r


@triton.jit
def mix_backward_kernel(
    row_ptrs,
    d_value_ptrs,
    saved_ptr,
    norm_ptr,
    proj_ptr,
    out_norm_ptr,
    d_query_ptr,
    d_out_norm_ptr,
    num_tokens,
    num_programs,
    needed,
    out_eps,
    D: tl.constexpr,
    DPAD: tl.constexpr,
    NUM_SOURCES: tl.constexpr,
    HAS_SUM: tl.constexpr,
    HAS_NORM: tl.constexpr,
    NEEDS_QUERY: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Gradients of the sources whose bit is set in `needed`, and a program's sums [P, D].

    row_ptrs: d_out, d_sum, sources. saved [T, 2 n + 1]: scores, factors, log-sum-exp. HAS_SUM:
    d_sum joins the gradient of the last source. HAS_NORM: d_out is the gradient of the normed mix.
    """
    NUM_STEPS: tl.constexpr = 2 * NUM_SOURCES + 1 + HAS_SUM
    NUM_SAVED: tl.constexpr = 2 * NUM_SOURCES + 1
    pid = tl.program_id(0)
    d = tl.arange(0, DPAD)
    mask = d < D
    query = tl.load(norm_ptr + d, mask=mask, other=0.0).to(tl.float32)
    query *= tl.load(proj_ptr + d, mask=mask, other=0.0).to(tl.float32)
    d_mix = tl.zeros((DPAD,), tl.float32)
    mix = tl.zeros((DPAD,), tl.float32)  # Once it has been used, d_sum.
    d_query = tl.zeros((DPAD,), tl.float32)
    d_out_norm = tl.zeros((DPAD,), tl.float32)
    mean = 0.0
    score, scale, lse = 0.0, 0.0, 0.0
    count = tl.cdiv(num_tokens - pid, num_programs)
    for step in tl.range(0, count * NUM_STEPS, num_stages=STAGES):
        k = step % NUM_STEPS
        token = (pid + step // NUM_STEPS * num_programs).to(tl.int64)
        at = row_of_step(k, NUM_SOURCES, NUM_STEPS)
        source = source_address(row_ptrs, at, NUM_SOURCES + 2)
        value = tl.load(source + token * D + d, mask=mask, other=0.0).to(tl.float32)
        weight = tl.exp2((score - lse) * LOG2_E)
        own_score, own_scale = score, scale
        # Of the next step, whose wait would else be for memory each time.
        i = tl.maximum(row_of_step((step + 1) % NUM_STEPS, NUM_SOURCES, NUM_STEPS) - 2, 0)
        saved_at = saved_ptr + token * NUM_SAVED
        score, scale = tl.load(saved_at + i), tl.load(saved_at + NUM_SOURCES + i)
        lse = tl.load(saved_at + 2 * NUM_SOURCES)
        if k == 0:
            d_mix = value
            mix = tl.zeros((DPAD,), tl.float32)
        elif k <= NUM_SOURCES:
            mix += weight * value
            if k == NUM_SOURCES:
                if HAS_NORM:
                    out_norm = tl.load(out_norm_ptr + d, mask=mask, other=0.0).to(tl.float32)
                    d_mix, mean, d_out_norm = norm_backward(
                        d_mix, mix, out_norm, d_out_norm, out_eps, D
                    )
                else:
                    mean = tl.sum(d_mix * mix)
        elif at == 1:
            mix = value
        else:
            own = at - 2
            d_score = 0.0
            if NUM_SOURCES > 1:
                d_score = weight * (tl.sum(d_mix * value) - mean)
            along = d_score * own_scale
            d_value = weight * d_mix + along * query - along * own_score * own_scale / D * value
            if HAS_SUM and own == NUM_SOURCES - 1:
                d_value += mix
            if NEEDS_QUERY:
                d_query += along * value
            d_value_at = source_address(d_value_ptrs, own, NUM_SOURCES) + token * D + d
            is_needed = mask & ((needed >> own) & 1 == 1)
            d_value = d_value.to(row_ptrs[0].dtype.element_ty)
            tl.store(d_value_at, d_value, mask=is_needed, eviction_policy="evict_first")
    at = pid.to(tl.int64) * D + d
    if NEEDS_QUERY:
        tl.store(d_query_ptr + at, d_query, mask=mask)
    if HAS_NORM:
        tl.store(d_out_norm_ptr + at, d_out_norm, mask=mask)


@triton.jit
def weight_sums_kernel(
    partial_ptr,
    norm_ptr,
    proj_ptr,
    d_norm_ptr,
    d_proj_ptr,
    d_out_norm_ptr,
    num_rows,
    num_columns,
    num_blocks,
    BP: tl.constexpr,
    BC: tl.constexpr,
):
    """Gradients of norm and proj from the sums [P, D] of their product, and behind `num_blocks`
    programs that of the output norm from its own, which follow."""
    part = tl.program_id(0) // num_blocks
    column = tl.program_id(0) % num_blocks * BC + tl.arange(0, BC)
    mask = column < num_columns
    partial_ptr += part.to(tl.int64) * num_rows * num_columns
    total = column_total(partial_ptr, column, num_rows, num_columns, BP, BC)
    if part == 0:
        norm = tl.load(norm_ptr + column, mask=mask, other=0.0).to(tl.float32)
        proj = tl.load(proj_ptr + column, mask=mask, other=0.0).to(tl.float32)
        tl.store(d_norm_ptr + column, (total * proj).to(d_norm_ptr.dtype.element_ty), mask=mask)
        tl.store(d_proj_ptr + column, (total * norm).to(d_proj_ptr.dtype.element_ty), mask=mask)
    else:
        out = total.to(d_out_norm_ptr.dtype.element_ty)
        tl.store(d_out_norm_ptr + column, out, mask=mask)
