"""RMSNorm in the released order: normalise in float32, cast, then multiply by the weight.

Architecture 3: RMSNorm(x; w, eps) = w * cast(x_f32 * rsqrt(mean(x_f32^2) + eps)).
"""

import torch
from torch import Tensor, nn

from k3_core.ops.math import math_dtype, rms_scale


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis with a learned weight [size]."""

    def __init__(
        self,
        size: int,
        eps: float,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size] in the dtype of `x`."""
        normed = x.to(math_dtype(x))
        normed = normed * rms_scale(normed, self.eps)
        return self.weight.to(x.dtype) * normed.to(x.dtype)

    def extra_repr(self) -> str:
        """Size and epsilon, for printing a model."""
        return f"{self.weight.shape[0]}, eps={self.eps}"
