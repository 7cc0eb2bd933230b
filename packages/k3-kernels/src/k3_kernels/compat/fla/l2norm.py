"""fla.modules.l2norm."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from k3_core.ops.math import math_dtype


def l2norm(x: Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> Tensor:
    """x / sqrt(sum x^2 + eps) over the last dim, computed in float32 (float64 for float64)."""
    exact = x.to(math_dtype(x))
    scale = torch.rsqrt(exact.square().sum(-1, keepdim=True) + eps)
    return (exact * scale).to(output_dtype or x.dtype)


l2_norm = l2norm


class L2Norm(nn.Module):
    """`l2norm` as a layer."""

    def __init__(self, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.eps = eps
        self.output_dtype = output_dtype

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dim."""
        return l2norm(x, self.eps, self.output_dtype)
