"""Absorbed attention of one query a sequence over a paged latent cache (architecture 3.3, 3.6).

All heads read the same cached latents, so a tile of them is loaded once for BH heads and serves
as keys and as values. A sequence is cut in SPLITS pieces that run side by side, each leaving a
normalised output and its log-sum-exp, and a second kernel sums them: the split makes a small
batch fill the card. Pieces follow from the length on the device. At B = 64, H = 96 and 32K tokens
a call reads 2.4 GB (0.57 ms at 4.26 TB/s) and computes 0.44 TFLOP (0.58 ms at 761 TFLOP/s), both
at their limits: head blocks of 64 compute 128 / 96 of that.

Legend: B sequences, H heads, C latent, R shared key, X = C + R, P pages of L tokens, M pages a row.
"""

import triton
import triton.language as tl

from k3_kernels.early import wait_for_inputs


@triton.jit
def mla_decode_kernel(
    q_latent_ptr,
    q_rope_ptr,
    pages_ptr,
    table_ptr,
    lengths_ptr,
    part_ptr,
    lse_ptr,
    num_heads,
    q_latent_stride_b,
    q_latent_stride_h,
    q_rope_stride_b,
    q_rope_stride_h,
    page_stride,
    token_stride,
    table_stride,
    max_length,
    scale,
    L: tl.constexpr,
    C: tl.constexpr,
    CPAD: tl.constexpr,
    R: tl.constexpr,
    RPAD: tl.constexpr,
    SPLITS: tl.constexpr,
    BH: tl.constexpr,
    BN: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """One piece of one sequence for BH heads; neighbours in the grid share the piece's pages."""
    wait_for_inputs(IS_EARLY)
    num_blocks = tl.cdiv(num_heads, BH)
    pid = tl.program_id(0)
    head = (pid % num_blocks) * BH + tl.arange(0, BH)
    split = pid // num_blocks % SPLITS
    b = (pid // num_blocks // SPLITS).to(tl.int64)
    # A row cannot hold more than its pages, whatever its length says.
    length = tl.minimum(tl.load(lengths_ptr + b).to(tl.int32), max_length)
    piece = tl.cdiv(tl.cdiv(length, BN), SPLITS) * BN
    start = split * piece
    stop = tl.minimum(start + piece, length)
    is_head = head < num_heads
    row = (b * num_heads + head) * SPLITS + split
    if start >= stop:
        tl.store(lse_ptr + row, -float("inf"), mask=is_head)
        return
    c, r = tl.arange(0, CPAD), tl.arange(0, RPAD)
    h = head.to(tl.int64)[:, None]
    q_at = q_latent_ptr + b * q_latent_stride_b + h * q_latent_stride_h + c[None, :]
    q_c = tl.load(q_at, mask=is_head[:, None] & (c < C)[None, :], other=0.0)
    q_at = q_rope_ptr + b * q_rope_stride_b + h * q_rope_stride_h + r[None, :]
    q_r = tl.load(q_at, mask=is_head[:, None] & (r < R)[None, :], other=0.0)
    acc = tl.zeros((BH, CPAD), tl.float32)
    top = tl.full((BH,), -float("inf"), tl.float32)
    total = tl.zeros((BH,), tl.float32)
    for first in range(start, stop, BN):
        token = first + tl.arange(0, BN)
        is_token = token < stop
        if L % BN == 0:
            # The tile lies in one page: one entry of the table, and rows at fixed distances.
            page = tl.load(table_ptr + b * table_stride + first // L).to(tl.int64)
            in_page = first % L + tl.arange(0, BN)
        else:
            page = tl.load(table_ptr + b * table_stride + token // L, mask=is_token, other=0)
            page = page.to(tl.int64)
            in_page = token % L
        at = pages_ptr + page * page_stride + in_page * token_stride
        is_latent = is_token[:, None]
        if CPAD > C:
            is_latent = is_latent & (c < C)[None, :]
        latent = tl.load(at[:, None] + c[None, :], mask=is_latent, other=0.0).to(q_c.dtype)
        is_rope = is_token[None, :]
        if RPAD > R:
            is_rope = is_rope & (r < R)[:, None]
        rope = tl.load(at[None, :] + C + r[:, None], mask=is_rope, other=0.0).to(q_r.dtype)
        scores = tl.dot(q_c, latent.T, input_precision=PRECISION)
        scores = tl.dot(q_r, rope, scores, input_precision=PRECISION) * scale
        scores = tl.where(is_token[None, :], scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_top[:, None])
        old = tl.exp2(top - new_top)
        total = total * old + tl.sum(weights, axis=1)
        acc = acc * old[:, None]
        acc = tl.dot(weights.to(latent.dtype), latent, acc, input_precision=PRECISION)
        top = new_top
    part_at = part_ptr + row.to(tl.int64)[:, None] * C + c[None, :]
    mask = is_head[:, None] & (c < C)[None, :]
    tl.store(part_at, acc * (1.0 / total)[:, None], mask=mask)
    tl.store(lse_ptr + row, top + tl.log2(total), mask=is_head)


@triton.jit
def sum_pieces(
    part_ptr,
    lse_ptr,
    row,
    is_row,
    c,
    splits,
    C: tl.constexpr,
    SPAD: tl.constexpr,
    BS: tl.constexpr,
):
    """The pieces of `row` [BM] (a sequence and head each) weighted by 2^lse, at the values `c`:
    [BM, BC] in float32, zeros for no pieces. BS pieces at a time are read side by side."""
    s = tl.arange(0, SPAD)[None, :]
    first_piece = row[:, None] * splits
    is_piece = is_row[:, None] & (s < splits)
    lse = tl.load(lse_ptr + first_piece + s, mask=is_piece, other=-float("inf"))
    top = tl.max(lse, axis=1)[:, None]
    top = tl.where(top == -float("inf"), 0.0, top)
    total = tl.sum(tl.exp2(lse - top), axis=1)[:, None]
    acc = tl.zeros((row.shape[0], c.shape[0]), tl.float32)
    for first in range(0, splits, BS):
        i = first + tl.arange(0, BS)[None, :]
        is_own = is_row[:, None] & (i < splits)
        own = tl.load(lse_ptr + first_piece + i, mask=is_own, other=-float("inf"))
        weight = tl.exp2(own - top)[:, :, None]
        # What an empty piece left behind is not zero but unwritten.
        mask = (weight > 0.0) & (c < C)[None, None, :]
        part_at = part_ptr + (first_piece + i)[:, :, None] * C + c[None, None, :]
        part = tl.load(part_at, mask=mask, other=0.0)
        acc += tl.sum(part * weight, axis=1)
    return acc / tl.where(total == 0.0, 1.0, total)


@triton.jit
def reduce_kernel(
    part_ptr,
    lse_ptr,
    out_ptr,
    splits,
    C: tl.constexpr,
    SPAD: tl.constexpr,
    BS: tl.constexpr,
    BC: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """`sum_pieces` of every sequence and head. A program makes BC values of one."""
    wait_for_inputs(IS_EARLY)
    num_blocks = tl.cdiv(C, BC)
    row = (tl.program_id(0) // num_blocks).to(tl.int64) + tl.arange(0, 1)
    c = tl.program_id(0) % num_blocks * BC + tl.arange(0, BC)
    acc = sum_pieces(part_ptr, lse_ptr, row, row >= 0, c, splits, C, SPAD, BS)
    out_at = out_ptr + row[:, None] * C + c[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=(c < C)[None, :])
