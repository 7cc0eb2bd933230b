"""rms_norm in place, for inference on a CPU: as few calls as it takes, for few tokens.

Inputs of mixed or of 16-bit dtypes, and calls that need gradients, are the reference's.
"""

import torch
from torch import Tensor

from k3_core.ops.math import math_dtype
from k3_core.ops.rms_norm import reference
from k3_kernels.launch import needs_grad


def rms_norm(x: Tensor, weight_D: Tensor, *, eps: float) -> Tensor:
    """[..., D] -> [..., D] in the dtype of `x`; as the reference."""
    is_plain = x.dtype == weight_D.dtype == math_dtype(x) and weight_D.shape == x.shape[-1:]
    if not is_plain or needs_grad(x, weight_D):
        return reference.rms_norm(x, weight_D, eps=eps)
    return normed(x, eps).mul_(weight_D)


def normed(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last axis, a new tensor; no gradient."""
    scale = torch.linalg.vecdot(x, x).div_(x.shape[-1]).add_(eps).rsqrt_()
    return x * scale.unsqueeze(-1)
