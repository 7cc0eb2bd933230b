"""What a decode step of Gated MLA does on both sides of its attention (architecture 3.3).

Before: the norm of the queries' first factor, the second factor and its product with the keys'
part of the absorbed weights, a head and a few rows a program, with the latents' norm and the new
rows of the pages in programs of their own. After: the sum of the pieces of `mla_decode`, the
values and the gate. Each program holds its head's weights, which it asks for before it waits for
its inputs; the arithmetic is next to nothing. At 64 rows of k3-mini (8 heads, 256 -> 128 + 64,
latent 128) both read 1.3 MB of weights, under 1 us; twelve launches of torch and Triton took 31 us.

Legend: B rows, H heads, Q rank of the queries, N nope dim, R shared key dim, V value dim, C kv
latent, S pieces, L tokens a page, M pages a row.
"""

import triton
import triton.language as tl

from k3_kernels.early import wait_for_inputs
from k3_kernels.mla_decode.kernel import sum_pieces
from k3_kernels.tl_math import normed, sigmoid


@triton.jit
def load_normed(
    x_ptr,
    row,
    num_rows,
    stride,
    norm,
    eps,
    D: tl.constexpr,
    DPAD: tl.constexpr,
):
    """RMSNorm of `row` [BM] of D values, [BM, DPAD]."""
    d = tl.arange(0, DPAD)[None, :]
    is_in = (row < num_rows)[:, None] & (d < D)
    x = tl.load(x_ptr + row.to(tl.int64)[:, None] * stride + d, mask=is_in, other=0.0)
    return normed(x, norm, eps, D)


@triton.jit
def store_head(out_ptr, x, row, head, num_rows, H: tl.constexpr):
    """x [W, BM] into [B, H, W] of one head."""
    W: tl.constexpr = x.shape[0]
    at = out_ptr + (row.to(tl.int64) * H + head)[None, :] * W + tl.arange(0, W)[:, None]
    tl.store(at, x.to(out_ptr.dtype.element_ty), mask=(row < num_rows)[None, :])


@triton.jit
def make_queries(
    q_ptr,
    nope_weight,
    shared_weight,
    key_weight,
    norm_ptr,
    q_latent_ptr,
    q_shared_ptr,
    first_row,
    block,
    num_rows,
    q_stride,
    eps,
    H: tl.constexpr,
    Q: tl.constexpr,
    QPAD: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
    BM: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """Of BM rows the absorbed query of head `block`, or from H on the rest of a head's query. The
    weights are the left operands, as in `linear.kernel`."""
    head = block % H
    row = first_row + tl.arange(0, BM)
    i = tl.arange(0, QPAD)[None, :]
    norm = tl.load(norm_ptr + i, mask=i < Q, other=0.0)
    if block < H:
        nope = nope_weight.load([head * (N + R), 0])
        keys = key_weight.load([head * (N + V), 0])
        wait_for_inputs(IS_EARLY)
        q = load_normed(q_ptr, row, num_rows, q_stride, norm, eps, Q, QPAD)
        q_nope = tl.dot(nope, q.T, input_precision=PRECISION).to(q.dtype)
        q_latent = tl.dot(keys.T, q_nope, input_precision=PRECISION)
        store_head(q_latent_ptr, q_latent, row, head, num_rows, H)
    else:
        shared = shared_weight.load([head * (N + R) + N, 0])
        wait_for_inputs(IS_EARLY)
        q = load_normed(q_ptr, row, num_rows, q_stride, norm, eps, Q, QPAD)
        q_shared = tl.dot(shared, q.T, input_precision=PRECISION)
        store_head(q_shared_ptr, q_shared, row, head, num_rows, H)


@triton.jit
def append_latents(
    latent_ptr,
    norm_ptr,
    pages_ptr,
    table_ptr,
    lengths_ptr,
    first_row,
    num_rows,
    latent_stride,
    page_stride,
    token_stride,
    table_stride,
    num_tokens,
    eps,
    L: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    BM: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """The normed latents and shared keys of BM rows, at their last places in the pages."""
    c, r = tl.arange(0, C)[None, :], tl.arange(0, R)[None, :]
    norm = tl.load(norm_ptr + c)
    wait_for_inputs(IS_EARLY)
    row = first_row + tl.arange(0, BM)
    is_row = row < num_rows
    latent = load_normed(latent_ptr, row, num_rows, latent_stride, norm, eps, C, C)
    shared_at = latent_ptr + row.to(tl.int64)[:, None] * latent_stride + C + r
    shared = tl.load(shared_at, mask=is_row[:, None], other=0.0)
    position = tl.load(lengths_ptr + row, mask=is_row, other=0).to(tl.int32) - 1
    is_row = (position >= 0) & (position < num_tokens)
    table_at = table_ptr + row.to(tl.int64) * table_stride + position // L
    page = tl.load(table_at, mask=is_row, other=0).to(tl.int64)
    at = (pages_ptr + page * page_stride + position % L * token_stride)[:, None]
    tl.store(at + c, latent.to(pages_ptr.dtype.element_ty), mask=is_row[:, None])
    tl.store(at + C + r, shared.to(pages_ptr.dtype.element_ty), mask=is_row[:, None])


@triton.jit
def queries_kernel(
    q_ptr,
    latent_ptr,
    nope_weight,
    shared_weight,
    kv_weight,
    q_norm_ptr,
    kv_norm_ptr,
    q_latent_ptr,
    q_shared_ptr,
    pages_ptr,
    table_ptr,
    lengths_ptr,
    num_rows,
    q_stride,
    latent_stride,
    page_stride,
    token_stride,
    table_stride,
    num_tokens,
    eps,
    H: tl.constexpr,
    Q: tl.constexpr,
    QPAD: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    L: tl.constexpr,
    BM: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """Descriptors: the queries' weights [H (N + R), Q] in blocks of N and of R rows, those of keys
    and values [H (N + V), C] in blocks of N. Grid: tiles of rows x (two programs a head, then one).
    """
    num_tiles = tl.cdiv(num_rows, BM)
    first_row = tl.program_id(0) % num_tiles * BM
    block = tl.program_id(0) // num_tiles
    if block < 2 * H:
        make_queries(q_ptr, nope_weight, shared_weight, kv_weight, q_norm_ptr, q_latent_ptr,
                     q_shared_ptr, first_row, block, num_rows, q_stride, eps,
                     H, Q, QPAD, N, R, V, BM, PRECISION, IS_EARLY)  # fmt: skip
    else:
        append_latents(latent_ptr, kv_norm_ptr, pages_ptr, table_ptr, lengths_ptr, first_row,
                       num_rows, latent_stride, page_stride, token_stride, table_stride,
                       num_tokens, eps, L, R, C, BM, IS_EARLY)  # fmt: skip


@triton.jit
def values_kernel(
    part_ptr,
    lse_ptr,
    kv_weight,
    gate_ptr,
    y_ptr,
    num_rows,
    splits,
    gate_stride,
    H: tl.constexpr,
    N: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    SPAD: tl.constexpr,
    BS: tl.constexpr,
    BM: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """y [B, H, V] = sigmoid(gate) W_value o, with o [B, H, C] the sum of the pieces [B, H, S, C].
    `kv_weight` is a descriptor of [H (N + V), C] in blocks of V rows. Grid: tiles of rows x heads.
    """
    num_tiles = tl.cdiv(num_rows, BM)
    row = (tl.program_id(0) % num_tiles * BM + tl.arange(0, BM)).to(tl.int64)
    head = tl.program_id(0) // num_tiles
    weight = kv_weight.load([head * (N + V) + N, 0])
    wait_for_inputs(IS_EARLY)
    is_row, v = row < num_rows, tl.arange(0, V)[:, None]
    gate_at = gate_ptr + row[None, :] * gate_stride + head * V + v
    gate = tl.load(gate_at, mask=is_row[None, :], other=0.0).to(tl.float32)
    c = tl.arange(0, C)
    o = sum_pieces(part_ptr, lse_ptr, row * H + head, is_row, c, splits, C, SPAD, BS)
    y = tl.dot(weight, o.to(weight.dtype).T, input_precision=PRECISION)
    y = y.to(y_ptr.dtype.element_ty).to(tl.float32) * sigmoid(gate)
    y_at = y_ptr + (row[None, :] * H + head) * V + v
    tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=is_row[None, :])
