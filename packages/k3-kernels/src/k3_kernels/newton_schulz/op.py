"""newton_schulz on CUDA: symmetric products by Triton, the Gram form for small long matrices.

Legend: N matrices, m rows, n >= m columns.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from k3_core.ops.newton_schulz.reference import COEFFICIENTS
from k3_kernels.hopper import fits_descriptors
from k3_kernels.launch import dot_precision, needs_grad
from k3_kernels.newton_schulz import cpu
from k3_kernels.newton_schulz.forms import ASPECT, inverse_norms, on_wide
from k3_kernels.newton_schulz.kernel import symmetric_kernel

GRAM_ROWS = 256
"""Rows up to which the Gram form's products in float32 cost less than they save."""
SYMMETRIC_ROWS = 512
"""Rows from which enough tiles are above the diagonal; below, one launch is not worth three."""


class Tile(NamedTuple):
    """Rows x columns of a program, a multiple of the rows; inputs a step, warps, stages."""

    rows: int
    columns: int
    step: int
    num_warps: int
    num_stages: int


TILE = Tile(128, 256, 64, 8, 4)


def newton_schulz(
    matrices: Tensor, *, steps: int = 5, eps: float = 1e-7, dtype: torch.dtype | None = None
) -> Tensor:
    """Push the singular values of each [m, n] matrix towards one; as the reference.

    Symmetric products take bfloat16 matrices of at least `SYMMETRIC_ROWS` rows that start on
    16-byte boundaries; the rest, and calls that need gradients, are `newton_schulz.cpu`'s.
    """
    is_symmetric = (
        (dtype or matrices.dtype) == torch.bfloat16
        and steps > 0
        and not needs_grad(matrices)
        and has_symmetric_form(matrices)
    )
    if not is_symmetric:
        return cpu.newton_schulz(matrices, steps=steps, eps=eps, dtype=dtype)
    return on_wide(matrices, dtype, partial(symmetric_form, steps=steps, eps=eps))


def has_symmetric_form(matrices: Tensor) -> bool:
    """Whether the shape [..., m, n] is one whose symmetric products pay and can be read."""
    if matrices.ndim < 2 or not matrices.numel():
        return False
    m, n = sorted(matrices.shape[-2:])
    is_small = m < SYMMETRIC_ROWS or (m <= GRAM_ROWS and n >= ASPECT * m)
    return not is_small and m % 8 == n % 8 == 0


def symmetric_form(x_Nmn: Tensor, steps: int, eps: float) -> Tensor:
    """X <- (a I + b G + c G G) X with G = X X^T; step one divides by its norm."""
    x_Nmn = x_Nmn.contiguous()
    if not fits_descriptors(x_Nmn):
        x_Nmn = x_Nmn.clone()
    for step in range(steps):
        gram_Nmm = multiply_symmetric(x_Nmn)
        scale_N11 = None if step else inverse_norms(gram_Nmm, eps)
        x_Nmn = torch.bmm(multiply_symmetric(gram_Nmm, gram_Nmm, scale_N11), x_Nmn)
    return x_Nmn


def multiply_symmetric(
    x_Nmk: Tensor, gram_Nmm: Tensor | None = None, scale_N11: Tensor | None = None
) -> Tensor:
    """X X^T; or with X = G the factor s (a I + b s^2 G + c s^4 G G) of a step."""
    num_matrices, m, k = x_Nmk.shape
    tile = TILE
    flat = x_Nmk.view(-1, k)
    out_Nmm = x_Nmk.new_empty(num_matrices, m, m)
    squares = triton.cdiv(m, tile.columns)
    tiles = tile.columns // tile.rows * squares * (squares + 1) // 2
    a, b, c = COEFFICIENTS
    symmetric_kernel[(num_matrices * tiles,)](
        TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [tile.rows, tile.step]),
        TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [tile.columns, tile.step]),
        gram_Nmm,
        scale_N11,
        out_Nmm,
        m,
        triton.cdiv(k, tile.step),
        tiles,
        a,
        b,
        c,
        HAS_POLYNOMIAL=gram_Nmm is not None,
        HAS_SCALE=scale_N11 is not None,
        BM=tile.rows,
        BN=tile.columns,
        BK=tile.step,
        PRECISION=dot_precision(x_Nmk.dtype),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out_Nmm
