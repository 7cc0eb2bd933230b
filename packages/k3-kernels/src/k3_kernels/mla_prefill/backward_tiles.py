"""Layout of the queries in the backward of mla_prefill, and where its tiles are.

Each sequence of queries is padded to whole tiles of ROWS: behind it dO is zero and lse +inf, so
that its weights are zero and no later step masks queries. Bytes bound: at T = 8192, H = 96 and a
float32 gradient 1.0 GB are read and written before the products and 0.9 GB after them, 0.24 and
0.21 ms at 4.25 TB/s.

Legend: T queries, S keys, P padded queries, N sequences, H heads, D head dim, V value dim.
"""

import triton
import triton.language as tl

from k3_kernels.mla_prefill.kernel import bounds, find_sequence


@triton.jit
def load_rows(ptr, row, is_row, stride, FIRST: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr):
    """Columns FIRST .. FIRST + WIDTH - 1 of rows of D; zeros elsewhere, since 0 * NaN is NaN."""
    d = FIRST + tl.arange(0, WIDTH)
    mask = is_row[:, None] if FIRST + WIDTH <= D else is_row[:, None] & (d < D)[None, :]
    return tl.load(ptr + row[:, None] * stride + d[None, :], mask=mask, other=0.0)


@triton.jit
def store_rows(ptr, x, row, is_row, stride, FIRST: tl.constexpr, D: tl.constexpr):
    """Of a tile [rows, WIDTH], what `load_rows` would read."""
    d = FIRST + tl.arange(0, x.shape[1])
    mask = is_row[:, None] & (d < D)[None, :]
    tl.store(ptr + row[:, None] * stride + d[None, :], x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def tiles_to(sequence, cu_ptr, num_sequences, ROWS: tl.constexpr, NPAD: tl.constexpr):
    """Tiles of the sequences before one of them."""
    n = tl.arange(0, NPAD)
    is_before = n < tl.minimum(sequence, num_sequences)
    begins = tl.load(cu_ptr + n, mask=is_before, other=0).to(tl.int32)
    lengths = tl.load(cu_ptr + n + 1, mask=is_before, other=0).to(tl.int32) - begins
    return tl.sum((lengths + ROWS - 1) // ROWS)


@triton.jit
def prepare_kernel(
    out_ptr,
    d_out_ptr,
    lse_ptr,
    cu_q_ptr,
    padded_ptr,
    padded_lse_ptr,
    delta_ptr,
    num_sequences,
    num_tiles,
    num_heads,
    num_tokens,
    d_out_stride_t,
    d_out_stride_h,
    V: tl.constexpr,
    VPAD: tl.constexpr,
    NPAD: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Grid: tiles of ROWS queries x heads. out [T, H, V], lse [H, T]; padded [P, H, V], lse and
    delta [H, P]."""
    pid = tl.program_id(0)
    tile = pid // num_heads
    head = (pid % num_heads).to(tl.int64)
    sequence, tiles_before = find_sequence(tile, cu_q_ptr, num_sequences, ROWS, NPAD)
    if sequence >= num_sequences:
        return
    q_first, num_queries = bounds(cu_q_ptr, sequence)
    query = (tile - tiles_before) * ROWS + tl.arange(0, ROWS)
    v = tl.arange(0, VPAD)
    is_query = query < num_queries
    mask = is_query[:, None] & (v < V)[None, :]
    row = q_first + query
    out_at = out_ptr + (row * num_heads + head)[:, None] * V + v[None, :]
    out = tl.load(out_at, mask=mask, other=0.0)
    d_out_at = d_out_ptr + row[:, None] * d_out_stride_t + head * d_out_stride_h + v[None, :]
    # Delta of the gradient as the products read it: what rows of v share then adds nothing to dS.
    d_out = tl.load(d_out_at, mask=mask, other=0.0).to(padded_ptr.dtype.element_ty)
    delta = tl.sum(out * d_out.to(tl.float32), axis=1)
    lse = tl.load(lse_ptr + head * num_tokens + row, mask=is_query, other=float("inf"))
    place = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    padded_at = padded_ptr + (place * num_heads + head)[:, None] * V + v[None, :]
    tl.store(padded_at, d_out, mask=(v < V)[None, :])
    at = head * num_tiles * ROWS + place
    tl.store(padded_lse_ptr + at, lse)
    tl.store(delta_ptr + at, delta)


@triton.jit
def locate_kernel(
    cu_q_ptr,
    cu_k_ptr,
    table_ptr,
    num_sequences,
    NPAD: tl.constexpr,
    ROWS: tl.constexpr,
    BN: tl.constexpr,
):
    """Grid: tiles of BN keys. A row of the table: first query and queries of its sequence, first
    key and keys, which tile of the sequence it is, its first padded query. No keys: no tile."""
    tile = tl.program_id(0)
    sequence, tiles_before = find_sequence(tile, cu_k_ptr, num_sequences, BN, NPAD)
    at = table_ptr + tile * 6
    if sequence >= num_sequences:
        tl.store(at + 3, 0)
        return
    q_first, num_queries = bounds(cu_q_ptr, sequence)
    k_first, num_keys = bounds(cu_k_ptr, sequence)
    tl.store(at, q_first.to(tl.int32))
    tl.store(at + 1, num_queries)
    tl.store(at + 2, k_first.to(tl.int32))
    tl.store(at + 3, num_keys)
    tl.store(at + 4, tile - tiles_before)
    tl.store(at + 5, tiles_to(sequence, cu_q_ptr, num_sequences, ROWS, NPAD) * ROWS)


@triton.jit
def load_fragments(ptr, WIDTH: tl.constexpr):
    """A tile [64, WIDTH] that lies in the order of an accumulator's registers.

    From slow to fast: 8 columns, a warp's 16 rows, 8 rows, pairs of columns; then a thread's four
    values, two rows 8 apart by two columns.
    """
    x = tl.load(ptr + tl.arange(0, 64 * WIDTH))
    x = tl.reshape(x, (WIDTH // 8, 4, 8, 4, 2, 2))
    return tl.reshape(tl.permute(x, (1, 4, 2, 0, 3, 5)), (64, WIDTH))


@triton.jit
def unpad_kernel(
    padded_ptr,
    cu_q_ptr,
    dq_ptr,
    num_sequences,
    num_tiles,
    num_heads,
    scale,
    D: tl.constexpr,
    DA: tl.constexpr,
    DB: tl.constexpr,
    NPAD: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Grid: tiles of ROWS queries x heads. padded [H, P, D] times `scale` to dq [T, H, D].

    64 queries of `padded` are four blocks, each as `load_fragments` reads it: the columns of the
    first and the second half of DA, then of DB.
    """
    pid = tl.program_id(0)
    tile = pid // num_heads
    head = (pid % num_heads).to(tl.int64)
    sequence, tiles_before = find_sequence(tile, cu_q_ptr, num_sequences, ROWS, NPAD)
    if sequence >= num_sequences:
        return
    q_first, num_queries = bounds(cu_q_ptr, sequence)
    padded_at = padded_ptr + (head * num_tiles + tile) * ROWS * D
    for part in tl.static_range(ROWS // 64):
        at = padded_at + part * 64 * D
        out_at = dq_ptr + head * D
        query = (tile - tiles_before) * ROWS + part * 64 + tl.arange(0, 64)
        is_query = query < num_queries
        row = q_first + query
        for half in tl.static_range(2):
            x = load_fragments(at + half * 32 * DA, DA // 2)
            store_rows(out_at, x * scale, row, is_query, num_heads * D, half * (DA // 2), D)
            x = load_fragments(at + 64 * DA + half * 32 * DB, DB // 2)
            store_rows(out_at, x * scale, row, is_query, num_heads * D, DA + half * (DB // 2), D)
