"""Causal attention over packed sequences with an online softmax (architecture 3.3, report 2).

A program makes BM queries of one head. The head dim is taken in two powers of two (192 = 128 +
64), so that no product is padded. Keys before the diagonal need no mask; only the last blocks
of a program do. Late queries, which read most, start first; programs of one head follow each
other, so that its keys and values stay in the second-level cache. Everything is found from
cu_seqlens on the device. At T = 8192, H = 96: 2.06 TFLOP, 2.7 ms at 761 TFLOP/s.

Legend: T queries, S keys, N sequences, H heads, D head dim, V value dim.
"""

import triton
import triton.language as tl


@triton.jit
def load_keys(
    k, column, row, is_key, stride, D: tl.constexpr, WIDTH: tl.constexpr, IS_TMA: tl.constexpr
):
    """Columns `column` .. `column + WIDTH - 1` of a tile of keys, transposed: [WIDTH, BN]."""
    if IS_TMA:
        return k.load([row, column]).T
    else:
        d = column + tl.arange(0, WIDTH)
        key = row.to(tl.int64) + tl.arange(0, is_key.shape[0])
        mask = is_key[None, :] if WIDTH + column <= D else (d < D)[:, None] & is_key[None, :]
        return tl.load(k + key[None, :] * stride + d[:, None], mask=mask, other=0.0)


@triton.jit
def load_values(v, row, is_key, stride, V: tl.constexpr, VPAD: tl.constexpr, IS_TMA: tl.constexpr):
    """A tile of values [BN, VPAD]; rows past the sequence are zero, since 0 * NaN is NaN."""
    if IS_TMA:
        return v.load([row, 0])
    else:
        d = tl.arange(0, VPAD)
        key = row.to(tl.int64) + tl.arange(0, is_key.shape[0])
        mask = is_key[:, None] if VPAD == V else is_key[:, None] & (d < V)[None, :]
        return tl.load(v + key[:, None] * stride + d[None, :], mask=mask, other=0.0)


@triton.jit
def attend(
    acc,
    top,
    total,
    q_a,
    q_b,
    k_a,
    k_b,
    v,
    k_stride,
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
    IS_TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Keys start .. stop - 1, a multiple of BN of them or masked; last_key: of each query."""
    for first in range(start, stop, BN):
        key = first + tl.arange(0, BN)
        is_key = key < stop if IS_MASKED else tl.full((BN,), True, tl.int1)
        row = tl.cast(first, tl.int32)
        keys = load_keys(k_a, 0, row, is_key, k_stride, D, DA, IS_TMA)
        scores = tl.dot(q_a, keys, input_precision=PRECISION)
        if DA < D:
            keys = load_keys(k_b, DA, row, is_key, k_stride, D, DB, IS_TMA)
            scores = tl.dot(q_b, keys, scores, input_precision=PRECISION)
        if IS_MASKED:
            scores = tl.where(key[None, :] <= last_key[:, None], scores, -float("inf"))
        # The scale is positive, so it commutes with the maximum and joins the subtraction.
        new_top = tl.maximum(top, tl.max(scores, axis=1) * scale)
        weights = tl.exp2(scores * scale - new_top[:, None])
        old = tl.exp2(top - new_top)
        total = total * old + tl.sum(weights, axis=1)
        values = load_values(v, row, is_key, v_stride, V, VPAD, IS_TMA)
        acc = acc * old[:, None]
        acc = tl.dot(weights.to(values.dtype), values, acc, input_precision=PRECISION)
        top = new_top
    return acc, top, total


@triton.jit
def find_sequence(tile, cu_ptr, num_sequences, ROWS: tl.constexpr, NPAD: tl.constexpr):
    """Which sequence a tile is in, when each begins a new one, and the tiles before that sequence.

    A running sum over all of them, one vector operation. N for tiles past the last sequence.
    """
    n = tl.arange(0, NPAD)
    is_in = n < num_sequences
    begins = tl.load(cu_ptr + n, mask=is_in, other=0).to(tl.int32)
    lengths = tl.load(cu_ptr + n + 1, mask=is_in, other=0).to(tl.int32) - begins
    ends = tl.cumsum((lengths + ROWS - 1) // ROWS, axis=0)
    sequence = tl.sum((is_in & (ends <= tile)).to(tl.int32))
    return sequence, tl.max(tl.where(n < sequence, ends, 0))


@triton.jit
def bounds(cu_ptr, sequence):
    """First row of a sequence in 64 bits, and its length."""
    first = tl.load(cu_ptr + sequence).to(tl.int64)
    return first, (tl.load(cu_ptr + sequence + 1) - first).to(tl.int32)


@triton.jit
def mla_prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cu_q_ptr,
    cu_k_ptr,
    out_ptr,
    max_ptr,
    lse_ptr,
    num_sequences,
    num_tiles,
    num_heads,
    num_tokens,
    q_stride_t,
    q_stride_h,
    k_stride_s,
    k_stride_h,
    v_stride_s,
    v_stride_h,
    scale,
    D: tl.constexpr,
    DA: tl.constexpr,
    DB: tl.constexpr,
    V: tl.constexpr,
    VPAD: tl.constexpr,
    NPAD: tl.constexpr,
    HAS_MAX: tl.constexpr,
    HAS_LSE: tl.constexpr,
    IS_TMA: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid: heads x tiles of queries; `scale` (positive) holds log2(e), so that exp2 serves.

    lse [H, T]: log2 of the sum of exponentials, for the backward.
    """
    pid = tl.program_id(0)
    head = (pid // num_tiles).to(tl.int64)
    tile = num_tiles - 1 - pid % num_tiles
    sequence, tiles_before = find_sequence(tile, cu_q_ptr, num_sequences, BM, NPAD)
    if HAS_MAX:
        tl.store(max_ptr + tile.to(tl.int64) * num_heads + head, -float("inf"))
    if sequence >= num_sequences:
        return
    q_first, num_queries = bounds(cu_q_ptr, sequence)
    k_first, num_keys = bounds(cu_k_ptr, sequence)
    query = (tile - tiles_before) * BM + tl.arange(0, BM)
    is_query = query < num_queries
    last_key = num_keys - num_queries + query
    a, b, v = tl.arange(0, DA), DA + tl.arange(0, DB), tl.arange(0, VPAD)
    q_at = q_ptr + (q_first + query[:, None]) * q_stride_t + head * q_stride_h
    q_a = tl.load(q_at + a[None, :], mask=is_query[:, None], other=0.0)
    q_b = tl.load(q_at + b[None, :], mask=is_query[:, None] & (b < D)[None, :], other=0.0)
    k_at = k_ptr + k_first * k_stride_s + head * k_stride_h
    v_at = v_ptr + k_first * v_stride_s + head * v_stride_h
    if IS_TMA:
        # Bounds of the sequence itself: what lies past it is read as zero.
        k_a = tl.make_tensor_descriptor(k_at, [num_keys, D], [k_stride_s, 1], [BN, DA])
        k_b = tl.make_tensor_descriptor(k_at, [num_keys, D], [k_stride_s, 1], [BN, DB])
        value = tl.make_tensor_descriptor(v_at, [num_keys, V], [v_stride_s, 1], [BN, VPAD])
    else:
        k_a, k_b, value = k_at, k_at, v_at
    acc = tl.zeros((BM, VPAD), tl.float32)
    top = tl.full((BM,), -float("inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    first_diagonal = num_keys - num_queries + (tile - tiles_before) * BM
    full = (first_diagonal + 1) // BN * BN
    stop = tl.minimum(num_keys, first_diagonal + BM)
    acc, top, total = attend(
        acc,
        top,
        total,
        q_a,
        q_b,
        k_a,
        k_b,
        value,
        k_stride_s,
        v_stride_s,
        0,
        full,
        last_key,
        scale,
        D,
        DA,
        DB,
        V,
        VPAD,
        BN,
        False,
        IS_TMA,
        PRECISION,
    )
    acc, top, total = attend(
        acc,
        top,
        total,
        q_a,
        q_b,
        k_a,
        k_b,
        value,
        k_stride_s,
        v_stride_s,
        full,
        stop,
        last_key,
        scale,
        D,
        DA,
        DB,
        V,
        VPAD,
        BN,
        True,
        IS_TMA,
        PRECISION,
    )
    row = q_first + query[:, None]
    out_at = out_ptr + (row * num_heads + head) * V + v[None, :]
    out = (acc * (1.0 / total)[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_at, out, mask=is_query[:, None] & (v < V)[None, :])
    if HAS_LSE:
        lse_at = lse_ptr + head * num_tokens + q_first + query
        tl.store(lse_at, top + tl.log2(total), mask=is_query)
    if HAS_MAX:
        largest = tl.max(tl.where(is_query, top, -float("inf"))) * 0.6931471805599453
        tl.store(max_ptr + tile.to(tl.int64) * num_heads + head, largest)
