"""Attention over depth, one program a token, each source read once (report 3.1, 3.2).

The online softmax over the sources keeps one float32 row in registers, and the load of the next
source is issued before the reduction of the current one. Floor: (sources + 1) T D values, 276 us
for 9 sources of 8192 x 7168 bfloat16 at 4.26 TB/s. Widths are padded to a power of two (7168 to
8192), which costs idle lanes but no bytes.

Legend: T tokens, D model width, S pseudo-queries (sub-layers of a block), n sources.
"""

import triton
import triton.language as tl

from k3_kernels.early import wait_for_inputs
from k3_kernels.tl_math import normed


@triton.jit
def add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def row_score(value, query, eps, D: tl.constexpr):
    """(query . RMSNorm(value), its factor); both sums in one reduction, for half the barriers."""
    dot, square = tl.reduce((value * query, value * value), 0, add_pairs)
    scale = tl.rsqrt(square / D + eps)
    return dot * scale, scale


@triton.jit
def address_number(value_ptrs, i, NUM_SOURCES: tl.constexpr):
    """Address of source `i`, known only at run time, or of each of a tile; the first for others."""
    address = value_ptrs[0].to(tl.int64) + i * 0
    for j in tl.static_range(1, NUM_SOURCES):
        address = tl.where(i == j, value_ptrs[j].to(tl.int64), address)
    return address


@triton.jit
def source_address(value_ptrs, i, NUM_SOURCES: tl.constexpr):
    """Pointer of source `i`, or of each of a row of them, which are all `aligned`."""
    # A hint on what a function returns is lost: the conversion is here.
    address = address_number(value_ptrs, i, NUM_SOURCES).to(value_ptrs[0].dtype)
    return tl.multiple_of(address, 16)


@triton.jit
def source_row(value_ptrs, i, at, d, D: tl.constexpr, NUM_SOURCES: tl.constexpr):
    """Row of source `i`; nothing past the last source."""
    source = source_address(value_ptrs, i, NUM_SOURCES)
    return tl.load(source + at + d, mask=(d < D) & (i < NUM_SOURCES), other=0.0)


@triton.jit
def attn_res_kernel(
    value_ptrs,
    norm_ptr,
    proj_ptr,
    out_ptr,
    added_ptr,
    sum_ptr,
    out_norm_ptr,
    saved_ptr,
    eps,
    out_eps,
    D: tl.constexpr,
    DPAD: tl.constexpr,
    NUM_SOURCES: tl.constexpr,
    HAS_ADDED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_SAVED: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """softmax_i(proj . RMSNorm(v_i)) . v_i for one token.

    HAS_ADDED: the last source is its sum with `added`, which is stored; HAS_NORM: out is the norm
    of the mix. Both are rounded on the way as separate ops would round them. HAS_SAVED: scores,
    their factors and their log-sum-exp are stored in `saved` [T, 2 n + 1] for the backward.
    The loop is not unrolled: unrolled, ptxas hoists the loads of all sources and spills.
    """
    token = tl.program_id(0).to(tl.int64)
    at = token * D
    saved_at = saved_ptr + token * (2 * NUM_SOURCES + 1)
    d = tl.arange(0, DPAD)
    if IS_EARLY:
        query = tl.load(norm_ptr + d, mask=d < D, other=0.0).to(tl.float32)
        query *= tl.load(proj_ptr + d, mask=d < D, other=0.0).to(tl.float32)
        if HAS_NORM:
            out_norm = tl.load(out_norm_ptr + d, mask=d < D, other=0.0)
    wait_for_inputs(IS_EARLY)
    following = source_row(value_ptrs, 0, at, d, D, NUM_SOURCES)
    if not IS_EARLY:
        query = tl.load(norm_ptr + d, mask=d < D, other=0.0).to(tl.float32)
        query *= tl.load(proj_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    top = -float("inf")
    total = 0.0
    acc = tl.zeros((DPAD,), tl.float32)
    for i in range(NUM_SOURCES):
        value = following.to(tl.float32)
        if HAS_ADDED:
            is_last = (d < D) & (i == NUM_SOURCES - 1)
            value += tl.load(added_ptr + at + d, mask=is_last, other=0.0).to(tl.float32)
            rounded = value.to(sum_ptr.dtype.element_ty)
            tl.store(sum_ptr + at + d, rounded, mask=is_last)
            value = tl.where(is_last, rounded.to(tl.float32), value)
        following = source_row(value_ptrs, i + 1, at, d, D, NUM_SOURCES)
        score, scale = row_score(value, query, eps, D)
        if HAS_SAVED:
            tl.store(saved_at + i, score)
            tl.store(saved_at + NUM_SOURCES + i, scale)
        new_top = tl.maximum(top, score)
        old_weight = tl.exp(top - new_top)
        weight = tl.exp(score - new_top)
        acc = acc * old_weight + value * weight
        total = total * old_weight + weight
        top = new_top
    if HAS_SAVED:
        tl.store(saved_at + 2 * NUM_SOURCES, top + tl.log(total))
    mixed = (acc / total).to(out_ptr.dtype.element_ty)
    if HAS_NORM:
        if not IS_EARLY:
            out_norm = tl.load(out_norm_ptr + d, mask=d < D, other=0.0)
        mixed = normed(mixed, out_norm, out_eps, D)
    tl.store(out_ptr + at + d, mixed, mask=d < D)


@triton.jit
def merge_kernel(
    delta_ptr,
    prefix_ptr,
    blocks_ptr,
    lse_ptr,
    norm_ptr,
    proj_ptr,
    out_norm_ptr,
    mix_ptr,
    out_ptr,
    eps,
    out_eps,
    D: tl.constexpr,
    DPAD: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    HAS_BLOCKS: tl.constexpr,
    HAS_MIX: tl.constexpr,
):
    """prefix += delta; mix with the blocks' part; RMSNorm: the state stays in registers."""
    token = tl.program_id(0).to(tl.int64)
    at = token * D
    d = tl.arange(0, DPAD)
    mask = d < D
    prefix = tl.load(prefix_ptr + at + d, mask=mask, other=0.0).to(tl.float32)
    if HAS_DELTA:
        prefix += tl.load(delta_ptr + at + d, mask=mask, other=0.0).to(tl.float32)
        # Rounded before use, so that later sites, which read it back, see the same numbers.
        rounded = prefix.to(prefix_ptr.dtype.element_ty)
        tl.store(prefix_ptr + at + d, rounded, mask=mask)
        prefix = rounded.to(tl.float32)
    mix = prefix
    if HAS_BLOCKS:
        query = tl.load(norm_ptr + d, mask=mask, other=0.0).to(tl.float32)
        query *= tl.load(proj_ptr + d, mask=mask, other=0.0).to(tl.float32)
        score, _scale = row_score(prefix, query, eps, D)
        lse = tl.load(lse_ptr + token)
        # Weight of the running sum among all sources: a logistic function of the difference.
        own = tl.sigmoid(score - lse)
        blocks = tl.load(blocks_ptr + at + d, mask=mask, other=0.0).to(tl.float32)
        mix = prefix * own + blocks * (1.0 - own)
    mix = mix.to(out_ptr.dtype.element_ty)
    if HAS_MIX:
        tl.store(mix_ptr + at + d, mix, mask=mask)
    out_norm = tl.load(out_norm_ptr + d, mask=mask, other=0.0)
    tl.store(out_ptr + at + d, normed(mix, out_norm, out_eps, D), mask=mask)


@triton.jit
def block_scores_kernel(
    value_ptrs,
    query_ptr,
    scores_ptr,
    square_ptr,
    num_tokens,
    num_queries,
    D: tl.constexpr,
    NUM_SOURCES: tl.constexpr,
    PARTS: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    SPAD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """value . query [PARTS, n, T, S] and value . value [PARTS, n, T], each over a part of D."""
    part = tl.program_id(0) % PARTS
    i = tl.program_id(0) // PARTS % NUM_SOURCES
    t = (tl.program_id(0) // (PARTS * NUM_SOURCES)).to(tl.int64) * BT + tl.arange(0, BT)
    s = tl.arange(0, SPAD)
    is_token, is_query = (t < num_tokens)[:, None], (s < num_queries)[None, :]
    source = source_address(value_ptrs, i, NUM_SOURCES)
    acc = tl.zeros((BT, SPAD), tl.float32)
    square = tl.zeros((BT,), tl.float32)
    for start in range(part * BD, D, PARTS * BD):
        d = start + tl.arange(0, BD)
        value_at = source + t[:, None] * D + d[None, :]
        value = tl.load(value_at, mask=is_token & (d < D)[None, :], other=0.0).to(tl.float32)
        query_at = query_ptr + s[None, :] * D + d[:, None]
        query = tl.load(query_at, mask=is_query & (d < D)[:, None], other=0.0)
        acc = tl.dot(value, query, acc, input_precision=PRECISION)
        square += tl.sum(value * value, axis=1)
    row = (part * NUM_SOURCES + i).to(tl.int64) * num_tokens + t
    tl.store(square_ptr + row, square, mask=t < num_tokens)
    scores_at = scores_ptr + row[:, None] * num_queries + s[None, :]
    tl.store(scores_at, acc, mask=is_token & is_query)


@triton.jit
def block_mix_kernel(
    value_ptrs,
    scores_ptr,
    square_ptr,
    out_ptr,
    lse_ptr,
    num_tokens,
    num_queries,
    eps,
    D: tl.constexpr,
    NUM_SOURCES: tl.constexpr,
    NPAD: tl.constexpr,
    PARTS: tl.constexpr,
    BD: tl.constexpr,
    SPAD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out [S, T, D] and its log-sum-exp [S, T] for one token, all queries and BD channels."""
    num_tiles = tl.cdiv(D, BD)
    token = (tl.program_id(0) // num_tiles).to(tl.int64)
    tile = tl.program_id(0) % num_tiles
    d = tile * BD + tl.arange(0, BD)
    n = tl.arange(0, NPAD)
    s = tl.arange(0, SPAD).to(tl.int64)
    is_source, is_query = n < NUM_SOURCES, (s < num_queries)[:, None]
    source = source_address(value_ptrs, n, NUM_SOURCES)
    value_at = source[:, None] + token * D + d[None, :]
    value = tl.load(value_at, mask=is_source[:, None] & (d < D)[None, :], other=0.0)
    scores = tl.zeros((SPAD, NPAD), tl.float32)
    square = tl.zeros((NPAD,), tl.float32)
    for part in tl.static_range(PARTS):
        row = (part * NUM_SOURCES + n).to(tl.int64) * num_tokens + token
        square += tl.load(square_ptr + row, mask=is_source, other=0.0)
        scores_at = scores_ptr + row[None, :] * num_queries + s[:, None]
        scores += tl.load(scores_at, mask=is_source[None, :] & is_query, other=0.0)
    scores = tl.where(
        is_source[None, :], scores * tl.rsqrt(square / D + eps)[None, :], -float("inf")
    )
    top = tl.max(scores, axis=1)
    weight = tl.exp(scores - top[:, None])
    total = tl.sum(weight, axis=1)
    mix = tl.dot(weight / total[:, None], value.to(tl.float32), input_precision=PRECISION)
    out_at = out_ptr + (s[:, None] * num_tokens + token) * D + d[None, :]
    tl.store(out_at, mix.to(out_ptr.dtype.element_ty), mask=is_query & (d < D)[None, :])
    if tile == 0:
        tl.store(lse_ptr + s * num_tokens + token, top + tl.log(total), mask=s < num_queries)
