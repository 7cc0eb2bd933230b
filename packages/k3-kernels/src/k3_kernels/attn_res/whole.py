"""The mix of a token whose sources fit the registers: all of them asked for at once.

With a few tokens a kernel takes as long as its memory answers, so that it should ask once: the
loop of `kernel` waits for every source anew, and for the reductions in between.

Legend: T tokens, D model width, n sources.
"""

import triton
import triton.language as tl

from k3_kernels.attn_res.kernel import add_pairs, address_number
from k3_kernels.early import wait_for_inputs
from k3_kernels.tl_math import normed


@triton.jit
def whole_mix_kernel(
    value_ptrs,
    norm_ptr,
    proj_ptr,
    out_ptr,
    added_ptr,
    sum_ptr,
    out_norm_ptr,
    eps,
    out_eps,
    D: tl.constexpr,
    DPAD: tl.constexpr,
    NUM_SOURCES: tl.constexpr,
    NPAD: tl.constexpr,
    HAS_ADDED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """As `attn_res_kernel`, without anything saved for a backward. One token a program."""
    at = tl.program_id(0).to(tl.int64) * D
    d = tl.arange(0, DPAD)
    column = d[None, :]
    source = tl.arange(0, NPAD)[:, None]
    query = tl.load(norm_ptr + column, mask=column < D, other=0.0).to(tl.float32)
    query *= tl.load(proj_ptr + column, mask=column < D, other=0.0).to(tl.float32)
    if HAS_NORM:
        out_norm = tl.load(out_norm_ptr + d, mask=d < D, other=0.0)
    wait_for_inputs(IS_EARLY)
    is_in = (column < D) & (source < NUM_SOURCES)
    value_at = address_number(value_ptrs, source, NUM_SOURCES).to(value_ptrs[0].dtype)
    value_at = tl.multiple_of(value_at, (16, 16)) + at + column
    value = tl.load(value_at, mask=is_in, other=0.0).to(tl.float32)
    if HAS_ADDED:
        is_last = (column < D) & (source == NUM_SOURCES - 1)
        added_at = at + column + 0 * source
        value += tl.load(added_ptr + added_at, mask=is_last, other=0.0).to(tl.float32)
        rounded = value.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + added_at, rounded, mask=is_last)
        value = tl.where(is_last, rounded.to(tl.float32), value)
    dot, square = tl.reduce((value * query, value * value), 1, add_pairs)
    score = dot * tl.rsqrt(square / D + eps)
    score = tl.where(tl.arange(0, NPAD) < NUM_SOURCES, score, -float("inf"))
    weight = tl.exp(score - tl.max(score))
    mix = tl.sum(value * weight[:, None], 0) / tl.sum(weight)
    mix = mix.to(out_ptr.dtype.element_ty)
    if HAS_NORM:
        mix = normed(mix, out_norm, out_eps, D)
    tl.store(out_ptr + at + d, mix, mask=d < D)
