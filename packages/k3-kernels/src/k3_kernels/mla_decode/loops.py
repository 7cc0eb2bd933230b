"""mla_decode as compiled loops, for a few rows on a CPU: each row twice over its own tokens.

B sequences, H heads, C latent, R shared key, X = C + R cached values a token, P pages, L tokens a
page, M pages a sequence, S tokens of a sequence.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from k3_core.replay import launch
from k3_kernels.launch import last_contiguous
from k3_kernels.loops import DTYPES, MAX_TOKENS, compiled, part, takes, vector
from k3_kernels.loops.math import exp
from k3_kernels.mla_decode import cpu

MAX_QUERIES = 2**13
"""Values of the queries of a row: as many stay in the first cache beside what is read for them."""


def mla_decode(
    q_latent_BHC: Tensor,
    q_rope_BHR: Tensor,
    pages_PLX: Tensor,
    page_table_BM: Tensor,
    lengths_B: Tensor,
    *,
    scale: float,
) -> Tensor:
    """Attention of one query a sequence over its cached latents; as the reference."""
    num_rows, num_heads, num_latent = q_shape = q_latent_BHC.shape
    num_pages, page, width = pages_PLX.shape
    num_columns = page_table_BM.shape[1]
    is_taken = (
        num_rows <= MAX_TOKENS
        and num_heads * width <= MAX_QUERIES
        and q_rope_BHR.shape == (num_rows, num_heads, width - num_latent)
        and page_table_BM.shape == (num_rows, num_columns)
        and lengths_B.shape == (num_rows,)
        and page_table_BM.dtype is lengths_B.dtype is torch.int64
        and page_table_BM.is_cpu
        and lengths_B.is_cpu
        and takes(q_latent_BHC, q_rope_BHR, pages_PLX)
    )
    page_stride, token_stride, value_stride = pages_PLX.stride()
    if is_taken and value_stride == 1:
        q_latent_BHC, q_rope_BHR = last_contiguous(q_latent_BHC), last_contiguous(q_rope_BHR)
        page_table_BM, lengths_B = page_table_BM.contiguous(), lengths_B.contiguous()
        latent_row, latent_head, _ = q_latent_BHC.stride()
        rope_row, rope_head, _ = q_rope_BHR.stride()
        out_BHC = q_latent_BHC.new_empty(q_shape)
        are_valid = launch(
            _attend,
            q_latent_BHC.data_ptr(),
            q_rope_BHR.data_ptr(),
            pages_PLX.data_ptr(),
            page_table_BM.data_ptr(),
            lengths_B.data_ptr(),
            out_BHC.data_ptr(),
            num_rows,
            num_heads,
            num_latent,
            width,
            num_pages,
            page,
            num_columns,
            latent_row,
            latent_head,
            rope_row,
            rope_head,
            page_stride,
            token_stride,
            float(scale),
            DTYPES[q_latent_BHC.dtype],
        )
        if are_valid:
            return out_BHC
    # It also raises for what does not fit.
    return cpu.mla_decode(
        q_latent_BHC, q_rope_BHR, pages_PLX, page_table_BM, lengths_B, scale=scale
    )


@compiled
def _attend(
    q_latent: int,
    q_rope: int,
    pages: int,
    table: int,
    lengths: int,
    out: int,
    num_rows: int,
    num_heads: int,
    num_latent: int,
    width: int,
    num_pages: int,
    page: int,
    num_columns: int,
    latent_row: int,
    latent_head: int,
    rope_row: int,
    rope_head: int,
    page_stride: int,
    token_stride: int,
    scale: float,
    dtype: Any,
) -> bool:
    """False for a page that does not exist."""
    table_BM = vector(table, num_rows * num_columns, np.int64).reshape(num_rows, num_columns)
    lengths_B = vector(lengths, num_rows, np.int64)
    for b in range(num_rows):
        for j in range(_num_pages(lengths_B[b], page, num_columns)):
            if not 0 <= table_BM[b, j] < num_pages:
                return False
    query_HX = np.empty((num_heads, width), dtype)
    for b in range(num_rows):
        for h in range(num_heads):
            latent_C = part(q_latent, b * latent_row + h * latent_head, num_latent, dtype)
            for c in range(num_latent):
                query_HX[h, c] = latent_C[c] * dtype.type(scale)
            rope_R = part(q_rope, b * rope_row + h * rope_head, width - num_latent, dtype)
            for r in range(width - num_latent):
                query_HX[h, num_latent + r] = rope_R[r] * dtype.type(scale)
        starts_S = np.empty(min(max(lengths_B[b], 0), num_columns * page), np.int64)
        for j in range(_num_pages(lengths_B[b], page, num_columns)):
            for s in range(j * page, min((j + 1) * page, len(starts_S))):
                starts_S[s] = table_BM[b, j] * page_stride + (s - j * page) * token_stride
        out_HC = part(out, b * num_heads * num_latent, num_heads * num_latent, dtype)
        _attend_row(query_HX, pages, starts_S, out_HC.reshape(num_heads, num_latent))
    return True


@compiled
def _num_pages(length: int, page: int, num_columns: int) -> int:
    """Pages that tokens of this many lie in; a table holds no more than its columns."""
    return min((max(length, 0) + page - 1) // page, num_columns)


@compiled
def _attend_row(query_HX: np.ndarray, pages: int, starts_S: np.ndarray, out_HC: np.ndarray) -> None:
    """Scores of all tokens, their softmax, and the sum of the latents by it."""
    weights_HS = np.empty((len(query_HX), len(starts_S)), query_HX.dtype)
    last = len(query_HX) - 1
    for h in range(0, len(query_HX), 4):
        heads = h, min(h + 1, last), min(h + 2, last), min(h + 3, last)
        _score_four(query_HX, heads, pages, starts_S, weights_HS)
    for h in range(len(query_HX)):
        _softmax(weights_HS[h])
    _add_latents(weights_HS, pages, starts_S, out_HC)


@compiled
def _score_four(
    query_HX: np.ndarray,
    heads: tuple[int, int, int, int],
    pages: int,
    starts_S: np.ndarray,
    scores_HS: np.ndarray,
) -> None:
    """Products of four heads with all tokens, two at a time; after the last one that one again."""
    (h0, h1, h2, h3), last = heads, len(starts_S) - 1
    width, dtype = query_HX.shape[1], query_HX.dtype
    q0_X, q1_X, q2_X, q3_X = query_HX[h0], query_HX[h1], query_HX[h2], query_HX[h3]
    for s in range(0, len(starts_S), 2):
        s1 = min(s + 1, last)
        k_X, l_X = part(pages, starts_S[s], width, dtype), part(pages, starts_S[s1], width, dtype)
        a = b = c = d = e = f = g = h = dtype.type(0)
        for x in range(width):
            a += q0_X[x] * k_X[x]
            b += q1_X[x] * k_X[x]
            c += q2_X[x] * k_X[x]
            d += q3_X[x] * k_X[x]
            e += q0_X[x] * l_X[x]
            f += q1_X[x] * l_X[x]
            g += q2_X[x] * l_X[x]
            h += q3_X[x] * l_X[x]
        scores_HS[h0, s], scores_HS[h1, s], scores_HS[h2, s], scores_HS[h3, s] = a, b, c, d
        scores_HS[h0, s1], scores_HS[h1, s1], scores_HS[h2, s1], scores_HS[h3, s1] = e, f, g, h


@compiled
def _add_latents(
    weights_HS: np.ndarray, pages: int, starts_S: np.ndarray, out_HC: np.ndarray
) -> None:
    """The sums of the latents by the weights of each head, four tokens at a time."""
    num_heads, num_latent = out_HC.shape
    length, dtype = len(starts_S), out_HC.dtype
    out_HC[:] = 0
    for s in range(0, length - length % 4, 4):
        i_C = part(pages, starts_S[s], num_latent, dtype)
        j_C = part(pages, starts_S[s + 1], num_latent, dtype)
        k_C = part(pages, starts_S[s + 2], num_latent, dtype)
        l_C = part(pages, starts_S[s + 3], num_latent, dtype)
        for h in range(num_heads):
            weight_S, out_C = weights_HS[h], out_HC[h]
            a, b, c, d = weight_S[s], weight_S[s + 1], weight_S[s + 2], weight_S[s + 3]
            for x in range(num_latent):
                out_C[x] += a * i_C[x] + b * j_C[x] + c * k_C[x] + d * l_C[x]
    for s in range(length - length % 4, length):
        i_C = part(pages, starts_S[s], num_latent, dtype)
        for h in range(num_heads):
            a, out_C = weights_HS[h, s], out_HC[h]
            for x in range(num_latent):
                out_C[x] += a * i_C[x]


@compiled
def _softmax(scores_S: np.ndarray) -> None:
    """In place; zeros where it would be NaN, as the reference has it."""
    peak, total = scores_S.dtype.type(-np.inf), 0.0
    for s in range(len(scores_S)):
        peak = scores_S[s] if scores_S[s] > peak else peak
    for s in range(len(scores_S)):
        scores_S[s] = exp(scores_S[s] - peak)
        total += scores_S[s]
    factor = scores_S.dtype.type(1 / total)
    if total > 0:
        for s in range(len(scores_S)):
            scores_S[s] *= factor
    else:
        scores_S[:] = 0
