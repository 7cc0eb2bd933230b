"""Backward of causal attention over packed sequences, in two passes of plain Triton.

With weights P = exp(scale S - lse), dP = dO V^T and delta = rowsum(dO * O) from the unrounded
output: dS = P * (dP - delta), dV = P^T dO, dK = scale dS^T Q, dQ = scale dS K (report 2).
`prepare_kernel` (backward_tiles.py) makes delta and lays out what belongs to the queries. A program
of `keys_kernel` holds a tile of keys and goes over the queries that see it; one of `queries_kernel`
holds queries and goes over their keys. Each writes its own rows: deterministic without atomics.

Floor at T = 8192, H = 96, 192 / 128: five products are 5.4 TFLOP, 7.0 ms at 761 TFLOP/s. These
kernels make S and dP twice, 7.4 TFLOP, 9.8 ms; predicted 22 ms. `gluon_backward.py` makes them
once.

Legend: T queries, S keys, P padded queries, N sequences, H heads, D head dim, V value dim.
"""

import triton
import triton.language as tl

from k3_kernels.mla_prefill.backward_tiles import load_rows, store_rows, tiles_to
from k3_kernels.mla_prefill.kernel import bounds, find_sequence


@triton.jit
def add_queries(
    dk_a,
    dk_b,
    dv,
    k_a,
    k_b,
    v,
    q_at,
    q_stride,
    d_out_at,
    d_out_stride,
    lse_at,
    delta_at,
    start,
    stop,
    num_queries,
    offset,
    key,
    scale,
    D: tl.constexpr,
    DA: tl.constexpr,
    DB: tl.constexpr,
    V: tl.constexpr,
    VPAD: tl.constexpr,
    BM: tl.constexpr,
    IS_MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Queries start .. stop - 1, whole tiles; query i sees the keys up to offset + i."""
    for first in range(start, stop, BM):
        query = first + tl.arange(0, BM)
        is_query = query < num_queries
        row = query.to(tl.int64)
        q_a = load_rows(q_at, row, is_query, q_stride, 0, DA, D)
        scores = tl.dot(k_a, q_a.T, input_precision=PRECISION)
        if DA < D:
            q_b = load_rows(q_at, row, is_query, q_stride, DA, DB, D)
            scores = tl.dot(k_b, q_b.T, scores, input_precision=PRECISION)
        weights = tl.exp2(scores * scale - tl.load(lse_at + query)[None, :])
        if IS_MASKED:
            weights = tl.where(key[:, None] <= offset + query[None, :], weights, 0.0)
        d_out = load_rows(d_out_at, row, query < stop, d_out_stride, 0, VPAD, V)
        dv = tl.dot(weights.to(d_out.dtype), d_out, dv, input_precision=PRECISION)
        d_weights = tl.dot(v, d_out.T, input_precision=PRECISION)
        d_scores = weights * (d_weights - tl.load(delta_at + query)[None, :])
        d_scores = d_scores.to(q_a.dtype)
        dk_a = tl.dot(d_scores, q_a, dk_a, input_precision=PRECISION)
        if DA < D:
            dk_b = tl.dot(d_scores, q_b, dk_b, input_precision=PRECISION)
    return dk_a, dk_b, dv


@triton.jit
def keys_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    d_out_ptr,
    lse_ptr,
    delta_ptr,
    cu_q_ptr,
    cu_k_ptr,
    dk_ptr,
    dv_ptr,
    num_sequences,
    num_tiles,
    num_key_tiles,
    num_heads,
    q_stride_t,
    q_stride_h,
    k_stride_s,
    k_stride_h,
    v_stride_s,
    v_stride_h,
    scale,
    log2_scale,
    D: tl.constexpr,
    DA: tl.constexpr,
    DB: tl.constexpr,
    V: tl.constexpr,
    VPAD: tl.constexpr,
    NPAD: tl.constexpr,
    ROWS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid: heads x tiles of keys; early keys, which most queries see, start first."""
    pid = tl.program_id(0)
    head = (pid // num_key_tiles).to(tl.int64)
    tile = pid % num_key_tiles
    sequence, tiles_before = find_sequence(tile, cu_k_ptr, num_sequences, BN, NPAD)
    if sequence >= num_sequences:
        return
    q_first, num_queries = bounds(cu_q_ptr, sequence)
    k_first, num_keys = bounds(cu_k_ptr, sequence)
    q_tiles_before = tiles_to(sequence, cu_q_ptr, num_sequences, ROWS, NPAD)
    first_key = (tile - tiles_before) * BN
    key = first_key + tl.arange(0, BN)
    is_key = key < num_keys
    row = k_first + key
    k_at = k_ptr + head * k_stride_h
    k_a = load_rows(k_at, row, is_key, k_stride_s, 0, DA, D)
    k_b = load_rows(k_at, row, is_key, k_stride_s, DA, DB, D)
    v = load_rows(v_ptr + head * v_stride_h, row, is_key, v_stride_s, 0, VPAD, V)
    dk_a = tl.zeros((BN, DA), tl.float32)
    dk_b = tl.zeros((BN, DB), tl.float32)
    dv = tl.zeros((BN, VPAD), tl.float32)
    place = q_tiles_before.to(tl.int64) * ROWS
    q_at = q_ptr + q_first * q_stride_t + head * q_stride_h
    d_out_at = d_out_ptr + (place * num_heads + head) * V
    lse_at = lse_ptr + head * num_tiles * ROWS + place
    delta_at = delta_ptr + head * num_tiles * ROWS + place
    offset = num_keys - num_queries
    start = tl.maximum(first_key - offset, 0) // BM * BM
    stop = (num_queries + BM - 1) // BM * BM
    # The first tile whose first query sees all of the keys.
    full = tl.maximum(first_key + BN - 1 - offset + BM - 1, 0) // BM * BM
    full = tl.minimum(tl.maximum(full, start), stop)
    dk_a, dk_b, dv = add_queries(
        dk_a,
        dk_b,
        dv,
        k_a,
        k_b,
        v,
        q_at,
        q_stride_t,
        d_out_at,
        num_heads * V,
        lse_at,
        delta_at,
        start,
        full,
        num_queries,
        offset,
        key,
        log2_scale,
        D,
        DA,
        DB,
        V,
        VPAD,
        BM,
        True,
        PRECISION,
    )
    dk_a, dk_b, dv = add_queries(
        dk_a,
        dk_b,
        dv,
        k_a,
        k_b,
        v,
        q_at,
        q_stride_t,
        d_out_at,
        num_heads * V,
        lse_at,
        delta_at,
        full,
        stop,
        num_queries,
        offset,
        key,
        log2_scale,
        D,
        DA,
        DB,
        V,
        VPAD,
        BM,
        False,
        PRECISION,
    )
    store_rows(dv_ptr + head * V, dv, row, is_key, num_heads * V, 0, V)
    store_rows(dk_ptr + head * D, dk_a * scale, row, is_key, num_heads * D, 0, D)
    if DA < D:
        store_rows(dk_ptr + head * D, dk_b * scale, row, is_key, num_heads * D, DA, D)


@triton.jit
def add_keys(
    dq_a,
    dq_b,
    q_a,
    q_b,
    d_out,
    lse,
    delta,
    k_at,
    k_stride,
    v_at,
    v_stride,
    start,
    stop,
    last_key,
    scale,
    D: tl.constexpr,
    DA: tl.constexpr,
    DB: tl.constexpr,
    V: tl.constexpr,
    VPAD: tl.constexpr,
    BN: tl.constexpr,
    IS_MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Keys start .. stop - 1, a multiple of BN of them or masked; last_key: of each query."""
    for first in range(start, stop, BN):
        key = first + tl.arange(0, BN)
        is_key = key < stop if IS_MASKED else tl.full((BN,), True, tl.int1)
        row = key.to(tl.int64)
        k_a = load_rows(k_at, row, is_key, k_stride, 0, DA, D)
        scores = tl.dot(q_a, k_a.T, input_precision=PRECISION)
        if DA < D:
            k_b = load_rows(k_at, row, is_key, k_stride, DA, DB, D)
            scores = tl.dot(q_b, k_b.T, scores, input_precision=PRECISION)
        weights = tl.exp2(scores * scale - lse[:, None])
        if IS_MASKED:
            weights = tl.where(key[None, :] <= last_key[:, None], weights, 0.0)
        v = load_rows(v_at, row, is_key, v_stride, 0, VPAD, V)
        d_weights = tl.dot(d_out, v.T, input_precision=PRECISION)
        d_scores = (weights * (d_weights - delta[:, None])).to(k_a.dtype)
        dq_a = tl.dot(d_scores, k_a, dq_a, input_precision=PRECISION)
        if DA < D:
            dq_b = tl.dot(d_scores, k_b, dq_b, input_precision=PRECISION)
    return dq_a, dq_b


@triton.jit
def queries_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    d_out_ptr,
    lse_ptr,
    delta_ptr,
    cu_q_ptr,
    cu_k_ptr,
    dq_ptr,
    num_sequences,
    num_tiles,
    num_heads,
    q_stride_t,
    q_stride_h,
    k_stride_s,
    k_stride_h,
    v_stride_s,
    v_stride_h,
    scale,
    log2_scale,
    D: tl.constexpr,
    DA: tl.constexpr,
    DB: tl.constexpr,
    V: tl.constexpr,
    VPAD: tl.constexpr,
    NPAD: tl.constexpr,
    ROWS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid: heads x tiles of BM of the padded queries, late ones first."""
    pid = tl.program_id(0)
    parts = num_tiles * (ROWS // BM)
    head = (pid // parts).to(tl.int64)
    part = parts - 1 - pid % parts
    sequence, tiles_before = find_sequence(
        part // (ROWS // BM), cu_q_ptr, num_sequences, ROWS, NPAD
    )
    if sequence >= num_sequences:
        return
    q_first, num_queries = bounds(cu_q_ptr, sequence)
    k_first, num_keys = bounds(cu_k_ptr, sequence)
    first_query = part * BM - tiles_before * ROWS
    if first_query >= num_queries:
        return
    query = first_query + tl.arange(0, BM)
    is_query = query < num_queries
    row = q_first + query
    q_at = q_ptr + head * q_stride_h
    q_a = load_rows(q_at, row, is_query, q_stride_t, 0, DA, D)
    q_b = load_rows(q_at, row, is_query, q_stride_t, DA, DB, D)
    place = part.to(tl.int64) * BM + tl.arange(0, BM)
    d_out = load_rows(d_out_ptr + head * V, place, place >= 0, num_heads * V, 0, VPAD, V)
    at = head * num_tiles * ROWS + place
    lse, delta = tl.load(lse_ptr + at), tl.load(delta_ptr + at)
    k_at = k_ptr + k_first * k_stride_s + head * k_stride_h
    v_at = v_ptr + k_first * v_stride_s + head * v_stride_h
    dq_a = tl.zeros((BM, DA), tl.float32)
    dq_b = tl.zeros((BM, DB), tl.float32)
    first_diagonal = num_keys - num_queries + first_query
    last_key = first_diagonal + tl.arange(0, BM)
    full = (first_diagonal + 1) // BN * BN
    stop = tl.minimum(num_keys, first_diagonal + BM)
    dq_a, dq_b = add_keys(
        dq_a,
        dq_b,
        q_a,
        q_b,
        d_out,
        lse,
        delta,
        k_at,
        k_stride_s,
        v_at,
        v_stride_s,
        0,
        full,
        last_key,
        log2_scale,
        D,
        DA,
        DB,
        V,
        VPAD,
        BN,
        False,
        PRECISION,
    )
    dq_a, dq_b = add_keys(
        dq_a,
        dq_b,
        q_a,
        q_b,
        d_out,
        lse,
        delta,
        k_at,
        k_stride_s,
        v_at,
        v_stride_s,
        full,
        stop,
        last_key,
        log2_scale,
        D,
        DA,
        DB,
        V,
        VPAD,
        BN,
        True,
        PRECISION,
    )
    store_rows(dq_ptr + head * D, dq_a * scale, row, is_query, num_heads * D, 0, D)
    if DA < D:
        store_rows(dq_ptr + head * D, dq_b * scale, row, is_query, num_heads * D, DA, D)
