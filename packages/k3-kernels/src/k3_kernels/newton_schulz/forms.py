"""newton_schulz on Gram matrices: an iteration of small matrices, and one product with the input.

With X_k = P_k X and G_k = X_k X_k^T a step A = aI + bG + cG^2 gives P <- AP and G <- AAG, all of
them polynomials of one symmetric matrix, so that they commute. Five steps of [128 x 7168] are 0.23
GFLOP for the first G, 0.08 for the small products and 0.47 for P X in two parts, where the plain
iteration takes 2.4; X is read three times and the result written twice, 0.2 ms for 96 of them at
4.25 TB/s.

Precision. Singular values are squared in G, and a small one is enlarged by up to a^5 = 484. Small
matrices therefore have the precision of float32, and a bfloat16 input is multiplied by P in two
parts, its high and low bits: results are exact to their own rounding, 1.7e-3, where the iteration
of bfloat16 matrices is off by 1e-2 (normal values) to 2e-1 (low rank). In float32 and float64 G is
made anew after every 2 steps, which keeps what the plain iteration has.

Legend: N matrices, m rows, n >= m columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from k3_core.ops.math import math_dtype
from k3_core.ops.newton_schulz.reference import COEFFICIENTS

ASPECT = {torch.bfloat16: 2, torch.float32: 4, torch.float64: 4}
"""Columns a row from which the Gram form of a dtype has fewer products."""
STEPS_16, STEPS_FULL = 5, 2
"""Steps on one Gram matrix, of bfloat16 values and of wider ones."""


class SmallMatrices(NamedTuple):
    """Symmetric matrices of one stack, in a form of their own.

    gram: of X, to the form, with 1 / (|X| + eps) as [N, 1, 1]. factor: s (aI + b s^2 G + c s^4 GG),
    s one where there is None. multiply: a product that is symmetric. apply: P X.
    """

    gram: Callable[[Tensor, float], tuple[Tensor, Tensor]]
    factor: Callable[[Tensor, Tensor | None], Tensor]
    multiply: Callable[[Tensor, Tensor], Tensor]
    apply: Callable[[Tensor, Tensor], Tensor]


def on_wide(
    matrices: Tensor, dtype: torch.dtype | None, iterate: Callable[[Tensor], Tensor]
) -> Tensor:
    """`iterate` on a stack [N, m, n] with m <= n in the working dtype; undone on its result."""
    if matrices.ndim < 2:
        raise ValueError(f"newton_schulz needs [..., m, n], got {tuple(matrices.shape)}")
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    wide = matrices.mT if is_tall else matrices
    stack_Nmn = wide.reshape(-1, *wide.shape[-2:]).to(dtype or matrices.dtype)
    result = iterate(stack_Nmn).view(wide.shape).to(matrices.dtype)
    return result.mT if is_tall else result


def is_long(matrices: Tensor, dtype: torch.dtype | None) -> bool:
    """Whether the Gram form has fewer products."""
    aspect = ASPECT.get(dtype or matrices.dtype)
    if aspect is None or matrices.ndim < 2:
        return False
    m, n = sorted(matrices.shape[-2:])
    return n >= aspect * m


def gram_form(x_Nmn: Tensor, steps: int, eps: float, small: SmallMatrices) -> Tensor:
    """`steps` >= 1 steps on Gram matrices; the first divides by the norm of the input."""
    per_gram = STEPS_16 if x_Nmn.dtype == torch.bfloat16 else STEPS_FULL
    product = x_Nmn
    for start in range(0, steps, per_gram):
        x_Nmn = small.apply(product, x_Nmn) if start else x_Nmn
        gram, scale_N11 = small.gram(x_Nmn, eps)
        product = factor = small.factor(gram, None if start else scale_N11)
        for _ in range(start + 1, min(start + per_gram, steps)):
            gram = small.multiply(factor, small.multiply(factor, gram))
            factor = small.factor(gram, None)
            product = small.multiply(factor, product)
    return small.apply(product, x_Nmn)


def inverse_norms(gram_Nmm: Tensor, eps: float) -> Tensor:
    """1 / (|X|_F + eps), [N, 1, 1], from G = X X^T: its trace is the square of the norm."""
    squares_N = gram_Nmm.diagonal(dim1=-2, dim2=-1).to(math_dtype(gram_Nmm)).sum(-1)
    return squares_N.sqrt_().add_(eps).reciprocal_().view(-1, 1, 1)


def make_gram(x_Nmn: Tensor) -> Tensor:
    """X X^T in float32 or wider."""
    if x_Nmn.is_cuda and x_Nmn.dtype == torch.bfloat16:
        return torch.bmm(x_Nmn, x_Nmn.mT, out_dtype=torch.float32)
    x_Nmn = x_Nmn.to(math_dtype(x_Nmn))
    return torch.bmm(x_Nmn, x_Nmn.mT)


def _gram(x_Nmn: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    gram_Nmm = make_gram(x_Nmn)
    return gram_Nmm, inverse_norms(gram_Nmm, eps)


def _factor(gram_Nmm: Tensor, scale_N11: Tensor | None) -> Tensor:
    a, b, c = COEFFICIENTS
    if scale_N11 is not None:
        gram_Nmm = gram_Nmm * scale_N11.square()
    factor_Nmm = torch.baddbmm(gram_Nmm, gram_Nmm, gram_Nmm, beta=b, alpha=c)
    factor_Nmm.diagonal(dim1=-2, dim2=-1).add_(a)
    return factor_Nmm if scale_N11 is None else factor_Nmm.mul_(scale_N11)


def _apply(product_Nmm: Tensor, x_Nmn: Tensor) -> Tensor:
    high_Nmm = product_Nmm.to(x_Nmn.dtype)
    if x_Nmn.dtype == product_Nmm.dtype:
        return torch.bmm(high_Nmm, x_Nmn)
    return apply_parts(high_Nmm, (product_Nmm - high_Nmm).to(x_Nmn.dtype), x_Nmn)


def apply_parts(high_Nmm: Tensor, low_Nmm: Tensor, x_Nmn: Tensor) -> Tensor:
    """(high + low) X, of which only the small part is rounded twice."""
    return torch.bmm(low_Nmm, x_Nmn).baddbmm_(high_Nmm, x_Nmn)


WIDE = SmallMatrices(_gram, _factor, torch.bmm, _apply)
"""Matrices of torch in float32 or wider."""
