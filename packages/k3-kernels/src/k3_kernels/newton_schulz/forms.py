"""newton_schulz on Gram matrices: an iteration of small matrices, and one product with the input.

With X_k = P_k X and G_k = X_k X_k^T a step Q = bG + cG^2 gives P <- (a + Q) P and G <- (a + Q)^2 G,
all of them polynomials of one symmetric matrix, so that they commute. Of 96 x [128 x 7168] 5 steps
are 22 GFLOP for the first G, 7 for the small products and 45 for P X, where X itself is 226; X is
read three times and written twice, 0.2 ms at 4.25 TB/s.

Precision. Singular values are squared in G, and a small one is enlarged by up to a^5 = 484. Small
matrices are therefore float32 or wider, and a bfloat16 input is multiplied by P in two parts, high
and low bits: results are then exact to their own rounding, 1.7e-3, where the iteration of bfloat16
matrices is off by 1e-2 (normal values) to 2e-1 (values of low rank). In float32 and float64 G is
made anew after every 2 steps, which keeps what the plain iteration has.

Legend: N matrices, m rows, n >= m columns.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from k3_core.ops.math import math_dtype
from k3_core.ops.newton_schulz.reference import COEFFICIENTS

ASPECT = 2
"""Columns a row from which the Gram form has fewer products."""
STEPS_16, STEPS_FULL = 5, 2
"""Steps on one Gram matrix, of bfloat16 values and of wider ones."""


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


def gram_form(x_Nmn: Tensor, steps: int, eps: float) -> Tensor:
    """`steps` >= 1 steps on Gram matrices; bfloat16, float32 or float64."""
    a, b, c = COEFFICIENTS
    per_gram = STEPS_16 if x_Nmn.dtype == torch.bfloat16 else STEPS_FULL
    gram_Nmm = factor_Nmm = x_Nmn
    for step in range(steps):
        is_first = step % per_gram == 0
        if is_first:
            x_Nmn = _apply(factor_Nmm, x_Nmn) if step else x_Nmn
            gram_Nmm = _gram(x_Nmn)
        scale_N11 = None if step else inverse_norms(gram_Nmm, eps)
        if scale_N11 is not None:
            gram_Nmm = gram_Nmm * scale_N11.square()
        q_Nmm = torch.baddbmm(gram_Nmm, gram_Nmm, gram_Nmm, beta=b, alpha=c)
        if is_first:
            factor_Nmm = q_Nmm.clone()
            factor_Nmm.diagonal(dim1=-2, dim2=-1).add_(a)
        else:
            factor_Nmm = torch.baddbmm(factor_Nmm, q_Nmm, factor_Nmm, beta=a)
        if scale_N11 is not None:
            factor_Nmm.mul_(scale_N11)
        if step + 1 < steps and (step + 1) % per_gram:
            gram_Nmm = torch.baddbmm(gram_Nmm, q_Nmm, gram_Nmm, beta=a)
            gram_Nmm = torch.baddbmm(gram_Nmm, q_Nmm, gram_Nmm, beta=a)
    return _apply(factor_Nmm, x_Nmn)


def inverse_norms(gram_Nmm: Tensor, eps: float) -> Tensor:
    """1 / (|X|_F + eps), [N, 1, 1], from G = X X^T: its trace is the square of the norm."""
    squares_N = gram_Nmm.diagonal(dim1=-2, dim2=-1).to(math_dtype(gram_Nmm)).sum(-1)
    return squares_N.sqrt_().add_(eps).reciprocal_().view(-1, 1, 1)


def _gram(x_Nmn: Tensor) -> Tensor:
    """X X^T in float32 or wider."""
    if x_Nmn.is_cuda and x_Nmn.dtype == torch.bfloat16:
        return torch.bmm(x_Nmn, x_Nmn.mT, out_dtype=torch.float32)
    x_Nmn = x_Nmn.to(math_dtype(x_Nmn))
    return torch.bmm(x_Nmn, x_Nmn.mT)


def _apply(factor_Nmm: Tensor, x_Nmn: Tensor) -> Tensor:
    """P X, with P in two parts where X is bfloat16."""
    high_Nmm = factor_Nmm.to(x_Nmn.dtype)
    if x_Nmn.dtype == factor_Nmm.dtype:
        return torch.bmm(high_Nmm, x_Nmn)
    low_Nmm = (factor_Nmm - high_Nmm).to(x_Nmn.dtype)
    return torch.bmm(low_Nmm, x_Nmn).baddbmm_(high_Nmm, x_Nmn)
