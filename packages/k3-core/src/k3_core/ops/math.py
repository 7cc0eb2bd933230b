"""Small numerical helpers that several references share."""

import torch
from torch import Tensor


def math_dtype(x: Tensor) -> torch.dtype:
    """The dtype that an op computes in: float64 for float64 input, float32 for the rest."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def rms_scale(x: Tensor, eps: float) -> Tensor:
    """rsqrt(mean(x^2) + eps) over the last axis of an `x` already in the math dtype."""
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
