"""newton_schulz on CUDA: symmetric products by Triton, with X or in the Gram form.

Legend: N matrices, m rows, n >= m columns, W columns of a half of a pair (see kernel.py).
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from k3_core.custom_op import custom_op
from k3_core.ops.newton_schulz.reference import COEFFICIENTS
from k3_kernels.hopper import fits_descriptors
from k3_kernels.launch import dot_precision, needs_grad
from k3_kernels.newton_schulz import cpu
from k3_kernels.newton_schulz.forms import (
    SmallMatrices,
    apply_parts,
    gram_form,
    inverse_norms,
    is_long,
    make_gram,
    on_wide,
)
from k3_kernels.newton_schulz.kernel import symmetric_kernel

SYMMETRIC_ROWS = 512
"""Rows from which 3 of 4 blocks or fewer are made and products with X keep the tensor cores busy.
Below, long matrices take the Gram form, which saves reading and writing."""


class Tile(NamedTuple):
    """Rows x columns of a program, a multiple of the rows; inputs a step, warps, stages."""

    rows: int
    columns: int
    step: int
    num_warps: int
    num_stages: int


TILE = Tile(128, 256, 64, 8, 4)
TILE_PAIRS = Tile(64, 128, 64, 4, 3)


@custom_op("newton_schulz.triton", is_differentiable=False)
def newton_schulz(
    matrices: Tensor, *, steps: int = 5, eps: float = 1e-7, dtype: torch.dtype | None = None
) -> Tensor:
    """Push the singular values of each [m, n] matrix towards one; as the reference.

    The kernels take bfloat16: from `SYMMETRIC_ROWS` rows on sizes that are multiples of 8, below
    long matrices of any size. The rest, and calls that need gradients, are `newton_schulz.cpu`'s.
    """
    is_bfloat16 = (dtype or matrices.dtype) == torch.bfloat16
    if not is_bfloat16 or steps < 1 or not matrices.numel() or needs_grad(matrices):
        return cpu.newton_schulz(matrices, steps=steps, eps=eps, dtype=dtype)
    if has_symmetric_form(matrices):
        return on_wide(matrices, dtype, partial(symmetric_form, steps=steps, eps=eps))
    if is_long(matrices, dtype):
        return on_wide(matrices, dtype, partial(gram_form, steps=steps, eps=eps, small=PAIRS))
    return cpu.newton_schulz(matrices, steps=steps, eps=eps, dtype=dtype)


def has_symmetric_form(matrices: Tensor) -> bool:
    """Whether the products of [..., m, n] with X itself pay and can be read by descriptors."""
    if matrices.ndim < 2:
        return False
    m, n = sorted(matrices.shape[-2:])
    return m >= SYMMETRIC_ROWS and m % 8 == n % 8 == 0


def symmetric_form(x_Nmn: Tensor, steps: int, eps: float) -> Tensor:
    """X <- (a I + b G + c G G) X with G = X X^T; step one divides by its norm."""
    x_Nmn = x_Nmn.contiguous()
    if not fits_descriptors(x_Nmn):
        x_Nmn = x_Nmn.clone()
    for step in range(steps):
        gram_Nmm = multiply_symmetric(x_Nmn)
        scale_N11 = None if step else inverse_norms(gram_Nmm, eps)
        x_Nmn = torch.bmm(make_factor(gram_Nmm, scale_N11), x_Nmn)
    return x_Nmn


def multiply_symmetric(x_Nmk: Tensor) -> Tensor:
    """X X^T."""
    num_matrices, m, _ = x_Nmk.shape
    out_Nmm = x_Nmk.new_empty(num_matrices, m, m)
    return _launch(x_Nmk, x_Nmk, out_Nmm, TILE)


def make_factor(gram_Nmm: Tensor, scale_N11: Tensor | None) -> Tensor:
    """s (a I + b s^2 G + c s^4 G G), s one where there is none."""
    return _launch(
        gram_Nmm, gram_Nmm, torch.empty_like(gram_Nmm), TILE, gram=gram_Nmm, scale=scale_N11
    )


def pair_gram(x_Nmn: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """X X^T as pairs [N, m, 2, W], and 1 / (|X| + eps)."""
    gram_Nmm = make_gram(x_Nmn)
    num_matrices, m, _ = gram_Nmm.shape
    width = triton.cdiv(m, TILE_PAIRS.step) * TILE_PAIRS.step
    pairs_Nm2W = x_Nmn.new_zeros(num_matrices, m, 2, width)
    pairs_Nm2W[:, :, 0, :m] = gram_Nmm
    pairs_Nm2W[:, :, 1, :m] = gram_Nmm - pairs_Nm2W[:, :, 0, :m]
    return pairs_Nm2W, inverse_norms(gram_Nmm, eps)


def pair_factor(gram_Nm2W: Tensor, scale_N11: Tensor | None) -> Tensor:
    """`make_factor` of pairs."""
    return _launch(
        gram_Nm2W, gram_Nm2W, _like(gram_Nm2W), TILE_PAIRS, gram=gram_Nm2W, scale=scale_N11
    )


def pair_multiply(left_Nm2W: Tensor, right_Nm2W: Tensor) -> Tensor:
    """The product of pairs that commute."""
    return _launch(left_Nm2W, right_Nm2W, _like(left_Nm2W), TILE_PAIRS)


def pair_apply(product_Nm2W: Tensor, x_Nmn: Tensor) -> Tensor:
    """P X."""
    high_Nmm, low_Nmm = product_Nm2W[..., : product_Nm2W.shape[1]].unbind(2)
    return apply_parts(high_Nmm, low_Nmm, x_Nmn)


PAIRS = SmallMatrices(pair_gram, pair_factor, pair_multiply, pair_apply)


def _like(pairs_Nm2W: Tensor) -> Tensor:
    """Memory for pairs, with zeros where the kernel writes nothing."""
    is_filled = pairs_Nm2W.shape[1] == pairs_Nm2W.shape[3]
    return torch.empty_like(pairs_Nm2W) if is_filled else torch.zeros_like(pairs_Nm2W)


def _launch(
    left: Tensor,
    right: Tensor,
    out: Tensor,
    tile: Tile,
    *,
    gram: Tensor | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    """Fill `out` from stacks of matrices or of pairs, with `gram` as the factor of a step."""
    num_matrices, m = left.shape[:2]
    squares = triton.cdiv(m, tile.columns)
    tiles = tile.columns // tile.rows * squares * (squares + 1) // 2
    a, b, c = COEFFICIENTS
    symmetric_kernel[(num_matrices * tiles,)](
        _describe(left, tile.rows, tile.step),
        _describe(right, tile.columns, tile.step),
        gram,
        scale,
        out,
        m,
        out.stride(1),
        triton.cdiv(left.shape[-1], tile.step),
        tiles,
        a,
        b,
        c,
        HAS_POLYNOMIAL=gram is not None,
        HAS_SCALE=scale is not None,
        IS_PAIR=left.dim() == 4,
        BM=tile.rows,
        BN=tile.columns,
        BK=tile.step,
        PRECISION=dot_precision(left.dtype),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


def _describe(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    flat = x.view(x.shape[0] * x.shape[1], -1)
    return TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [rows, columns])
