"""Backward of the mix of a token whose sources fit the registers (formulas: `backward_kernel`).

A narrow row is a warp's: nothing waits for another warp, and a token's rows are all asked for at
once, each once. The stream of `backward_kernel` reads the sources twice and takes some 350
instructions a row for its addresses, its weight and its reduction, however narrow the row.

Floor: 2 n + 2 rows a token and the gradient of the sum, 47 us for 5 sources of 16,384 x 512
bfloat16 at 4.25 TB/s. About 10 instructions a value of a source: 20 us.

Legend: T tokens, D model width, n sources, P programs.
"""

import triton
import triton.language as tl

from k3_kernels.attn_res.backward_kernel import LOG2_E, norm_backward


@triton.jit
def whole_backward_kernel(
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
):
    """As `mix_backward_kernel`."""
    pid = tl.program_id(0)
    d = tl.arange(0, DPAD)
    mask = d < D
    query = tl.load(norm_ptr + d, mask=mask, other=0.0).to(tl.float32)
    query *= tl.load(proj_ptr + d, mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        out_norm = tl.load(out_norm_ptr + d, mask=mask, other=0.0).to(tl.float32)
    d_query = tl.zeros((DPAD,), tl.float32)
    d_out_norm = tl.zeros((DPAD,), tl.float32)
    for number in range(tl.cdiv(num_tokens - pid, num_programs)):
        token = (pid + number * num_programs).to(tl.int64)
        at = token * D + d
        saved_at = saved_ptr + token * (2 * NUM_SOURCES + 1)
        d_mix = tl.load(row_ptrs[0] + at, mask=mask, other=0.0)
        values = ()
        for i in tl.static_range(NUM_SOURCES):
            values += (tl.load(row_ptrs[i + 2] + at, mask=mask, other=0.0),)  # type: ignore
        if HAS_SUM:
            d_sum = tl.load(row_ptrs[1] + at, mask=mask, other=0.0)
        lse = tl.load(saved_at + 2 * NUM_SOURCES)
        weights = ()
        mix = tl.zeros((DPAD,), tl.float32)
        for i in tl.static_range(NUM_SOURCES):
            weights += (tl.exp2((tl.load(saved_at + i) - lse) * LOG2_E),)  # type: ignore
            mix += weights[i] * values[i].to(tl.float32)
        d_mix = d_mix.to(tl.float32)
        if HAS_NORM:
            d_mix, mean, d_out_norm = norm_backward(d_mix, mix, out_norm, d_out_norm, out_eps, D)
        else:
            mean = tl.sum(d_mix * mix)
        for i in tl.static_range(NUM_SOURCES):
            value = values[i].to(tl.float32)  # type: ignore
            score, scale = tl.load(saved_at + i), tl.load(saved_at + NUM_SOURCES + i)
            d_score = 0.0
            if NUM_SOURCES > 1:
                d_score = weights[i] * (tl.sum(d_mix * value) - mean)
            along = d_score * scale
            d_value = weights[i] * d_mix + along * query - along * score * scale / D * value
            if HAS_SUM and i == NUM_SOURCES - 1:
                d_value += d_sum.to(tl.float32)
            if NEEDS_QUERY:
                d_query += along * value
            d_value = d_value.to(row_ptrs[0].dtype.element_ty)
            is_needed = mask & ((needed >> i) & 1 == 1)
            tl.store(d_value_ptrs[i] + at, d_value, mask=is_needed)
    at = pid.to(tl.int64) * D + d
    if NEEDS_QUERY:
        tl.store(d_query_ptr + at, d_query, mask=mask)
    if HAS_NORM:
        tl.store(d_out_norm_ptr + at, d_out_norm, mask=mask)
