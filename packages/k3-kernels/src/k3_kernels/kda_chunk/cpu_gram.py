"""Decay factors of a chunk and the two decayed grams, without overflow (report 1.2, 1.4).

The grams are P_ij = sum_c q_i k_j e^(G_i - G_j) and A_ij alike with k_i, G the running sum of the
log decay. e^-G alone overflows, so the sum in the exponent is split around an anchor:

- inside a tile of `tile` tokens the anchor is the tile's middle row; the tile is chosen such that
  both exponents stay within 40 of zero (16 tokens at the bound -5, 1 token without a bound);
- a block of rows after a block of columns is anchored at the last column token, where both
  exponents are negative; blocks double in size (tile, 2 tile, ...) until they cover the chunk.

Legend: B chunk-heads, C tokens in a chunk, J tiles, I tokens in a tile, K key channels,
X pairs of neighbouring blocks. Axis 2 marks the pair (q rows, k rows).
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_MAX_EXPONENT = 40.0
_NEGLIGIBLE = 1e-30
"""Factors below this are 0: they change no float32 result, and denormals are very slow."""


def tile_width(lower_bound: float | None, chunk: int) -> int:
    """Largest power of two whose half, at `lower_bound` a token, stays in the exponent range."""
    width = 1
    while lower_bound is not None and 2 * width <= chunk and width * -lower_bound <= _MAX_EXPONENT:
        width *= 2
    return width


def flush(x: Tensor) -> Tensor:
    """Zero where |x| is negligible."""
    return F.hardshrink(x, _NEGLIGIBLE)


def decay_exp(log: Tensor, dtype: torch.dtype) -> Tensor:
    """e^log for log <= 0; exactly 0 where that is negligible, and never by way of a denormal."""
    return flush(log.to(dtype).clamp_min(-80.0).exp_())


def running_sum(x_BCK: Tensor, reverse: bool = False) -> Tensor:
    """Cumulative sum over the chunk, in place; from the end backwards with `reverse`.

    Groups of 8 rows and then their ends: a few adds of whole slices, where `torch.cumsum` walks
    one column at a time on the CPU.
    """
    groups_BX8K = x_BCK.unflatten(1, (-1, 8))
    rows, groups = groups_BX8K.unbind(2), groups_BX8K.unbind(1)
    if reverse:
        rows, groups = rows[::-1], groups[::-1]
    for previous, row in pairwise(rows):
        row.add_(previous)
    end = 0 if reverse else -1
    for previous, group in pairwise(groups):
        group.add_(previous[:, end].unsqueeze(1))
    return x_BCK


class Decay(NamedTuple):
    """Decay inside chunks. Logs are natural and float64: their differences are what counts."""

    rise_BJIK: Tensor  # e^(G_i - anchor), between e^-40 and e^40
    log_anchor_BJ1K: Tensor
    log_tile_end_BJK: Tensor  # G at the last token of each tile
    from_start_BCK: Tensor  # e^(G_i)
    to_end_BCK: Tensor  # e^(G_last - G_j)
    total_B1K: Tensor  # e^(G_last)


def chunk_decay(g_BCK: Tensor, tile: int) -> Decay:
    """Decay factors from the log decay of each token."""
    shape, dtype = g_BCK.shape, g_BCK.dtype
    log_BCK = running_sum(g_BCK.double())
    log_BJIK = log_BCK.view(shape[0], shape[1] // tile, tile, shape[2])
    middle = (tile - 1) // 2
    anchor_BJ1K = log_BJIK[:, :, middle : middle + 1].clone()
    tile_end_BJK = log_BJIK[:, :, -1].clone()
    end_B11K = tile_end_BJK[:, -1, None, None]
    rise_BJIK = log_BJIK.sub_(anchor_BJ1K).to(dtype).exp_()
    from_start = flush(rise_BJIK * decay_exp(anchor_BJ1K, dtype))
    to_end = flush(decay_exp(end_B11K - anchor_BJ1K, dtype) / rise_BJIK)
    return Decay(
        rise_BJIK,
        anchor_BJ1K,
        tile_end_BJK,
        from_start.view(shape),
        to_end.view(shape),
        decay_exp(end_B11K[:, 0], dtype),
    )


class GramOperands(NamedTuple):
    """Rows (q and k) and columns (k) scaled around the tile anchors."""

    rows_BJ2IK: Tensor
    cols_BJIK: Tensor


def gram_operands(q_BCK: Tensor, k_BCK: Tensor, decay: Decay) -> GramOperands:
    """q e^(G - anchor), k e^(G - anchor) and k e^(anchor - G)."""
    rise_BJIK = decay.rise_BJIK
    B, J, I, K = rise_BJIK.shape  # noqa: E741
    rows_BJ2IK = q_BCK.new_empty(B, J, 2, I, K)
    torch.mul(q_BCK.view(B, J, I, K), rise_BJIK, out=rows_BJ2IK[:, :, 0])
    torch.mul(k_BCK.view(B, J, I, K), rise_BJIK, out=rows_BJ2IK[:, :, 1])
    return GramOperands(rows_BJ2IK, k_BCK.view(B, J, I, K) / rise_BJIK)


def grams(operands: GramOperands, decay: Decay) -> Tensor:
    """(P, A) as `[B, 2, C, C]`, zero above the diagonal. A's own diagonal means nothing."""
    rows_BJ2IK, cols_BJIK = operands
    B, J, _, I, K = rows_BJ2IK.shape  # noqa: E741
    gram_B2CC = rows_BJ2IK.new_zeros(B, 2, J * I, J * I)
    tiles = torch.bmm(rows_BJ2IK.view(B * J, 2 * I, K), cols_BJIK.view(B * J, I, K).mT)
    _tiles_of(gram_B2CC, J).copy_(tiles.view(B, J, 2, I, I))
    for num_tiles in _block_sizes(J):
        rows, cols = _block_operands(operands, decay, num_tiles)
        blocks = torch.bmm(rows.flatten(0, 1).flatten(1, 3), cols.flatten(0, 1).flatten(1, 2).mT)
        target = _blocks_of(gram_B2CC, num_tiles, I)
        target.copy_(blocks.view(target.shape))
    return gram_B2CC.tril_()  # a select and not a product: what is masked may be infinite


def grams_backward(
    d_gram_B2CC: Tensor, operands: GramOperands, decay: Decay
) -> tuple[Tensor, Tensor]:
    """Gradients of `operands` from the gradient of `grams`, zero above the diagonal.

    The anchors get none: a shift of an anchor changes no product.
    """
    rows_BJ2IK, cols_BJIK = operands
    B, J, _, I, K = rows_BJ2IK.shape  # noqa: E741
    d_tiles = _tiles_of(d_gram_B2CC, J).reshape(B * J, 2 * I, I)
    d_rows = torch.bmm(d_tiles, cols_BJIK.view(B * J, I, K)).view(rows_BJ2IK.shape)
    d_cols = torch.bmm(d_tiles.mT, rows_BJ2IK.view(B * J, 2 * I, K)).view(cols_BJIK.shape)
    for num_tiles in _block_sizes(J):
        rows, cols = _block_operands(operands, decay, num_tiles)
        row_scale, col_scale = _block_scales(decay, num_tiles)
        target = _blocks_of(d_gram_B2CC, num_tiles, I)
        d_blocks = target.reshape(-1, num_tiles * 2 * I, num_tiles * I)
        d_block_rows = torch.bmm(d_blocks, cols.flatten(0, 1).flatten(1, 2)).view(rows.shape)
        d_block_cols = torch.bmm(d_blocks.mT, rows.flatten(0, 1).flatten(1, 3)).view(cols.shape)
        halves = (J // (2 * num_tiles), 2, num_tiles)
        d_rows.unflatten(1, halves)[:, :, 1].addcmul_(d_block_rows, row_scale.unsqueeze(3))
        d_cols.unflatten(1, halves)[:, :, 0].addcmul_(d_block_cols, col_scale)
    return d_rows, d_cols


def _block_sizes(num_tiles: int) -> list[int]:
    """Block lengths in tiles: 1, 2, 4, ... below the chunk's."""
    return [1 << level for level in range(num_tiles.bit_length() - 1)]


def _block_scales(decay: Decay, num_tiles: int) -> tuple[Tensor, Tensor]:
    """e^(anchor - ref) of the row tiles and e^(ref - anchor) of the column tiles.

    Both [B, X, num_tiles, 1, K]; ref is G at the last token of the column block.
    """
    halves = (-1, 2, num_tiles)
    dtype = decay.total_B1K.dtype
    anchor = decay.log_anchor_BJ1K.unflatten(1, halves)
    ref = decay.log_tile_end_BJK.unflatten(1, halves)[:, :, 0, -1, None, None]
    return decay_exp(anchor[:, :, 1] - ref, dtype), decay_exp(ref - anchor[:, :, 0], dtype)


def _block_operands(operands: GramOperands, decay: Decay, num_tiles: int) -> tuple[Tensor, Tensor]:
    """Rows [B, X, num_tiles, 2, I, K] and columns [B, X, num_tiles, I, K] of a block size."""
    row_scale, col_scale = _block_scales(decay, num_tiles)
    halves = (-1, 2, num_tiles)
    rows = operands.rows_BJ2IK.unflatten(1, halves)[:, :, 1] * row_scale.unsqueeze(3)
    cols = operands.cols_BJIK.unflatten(1, halves)[:, :, 0] * col_scale
    return rows, cols


def _tiles_of(gram_B2CC: Tensor, num_tiles: int) -> Tensor:
    """View [B, J, 2, I, I] of the diagonal tiles."""
    split = gram_B2CC.unflatten(3, (num_tiles, -1)).unflatten(2, (num_tiles, -1))
    return split.diagonal(dim1=2, dim2=4).permute(0, 4, 1, 2, 3)


def _blocks_of(gram_B2CC: Tensor, num_tiles: int, tile: int) -> Tensor:
    """View [B, X, num_tiles, 2, I, num_tiles * I] of the blocks below the diagonal of a size."""
    halves = (-1, 2, num_tiles * tile)
    split = gram_B2CC.unflatten(3, halves).unflatten(2, halves)[:, :, :, 1, :, :, 0]
    blocks = split.diagonal(dim1=2, dim2=4).permute(0, 4, 1, 2, 3)
    return blocks.unflatten(3, (num_tiles, tile)).transpose(2, 3)
