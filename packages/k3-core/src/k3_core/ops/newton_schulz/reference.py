"""Reference of newton_schulz: a quintic iteration on stacks of matrices [..., m, n]."""

import torch
from torch import Tensor

from k3_core.ops.math import math_dtype

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def newton_schulz(
    matrices: Tensor, *, steps: int = 5, eps: float = 1e-7, dtype: torch.dtype | None = None
) -> Tensor:
    """Push the singular values of each [m, n] matrix towards one.

    X0 = M / |M|_F, then X <- aX + b(XX^T)X + c(XX^T)^2 X, on the side with fewer rows. The
    result has the dtype and shape of the input; `dtype` is the working one (bfloat16 on a GPU).
    A zero matrix stays zero.
    """
    if matrices.ndim < 2:
        raise ValueError(f"newton_schulz needs [..., m, n], got {tuple(matrices.shape)}")
    a, b, c = COEFFICIENTS
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    wide = matrices.mT if is_tall else matrices
    x = wide.reshape(-1, *wide.shape[-2:]).to(dtype or matrices.dtype)
    norm = torch.linalg.matrix_norm(x.to(math_dtype(x)), keepdim=True)
    x = x / (norm.to(x.dtype) + eps)
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    x = x.view(wide.shape).to(matrices.dtype)
    return x.mT if is_tall else x
