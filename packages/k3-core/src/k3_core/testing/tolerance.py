"""How far from the float64 reference a result may be, by the dtype that it was computed from.

Source: repository.md 7.3 (one table by dtype). The measure is the norm of the difference over the
norm of the reference, tensor by tensor.
"""

import torch
from torch import Tensor

TOLERANCE: dict[torch.dtype, float] = {
    torch.float64: 1e-10,
    torch.float32: 1e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1e-2,
}

GRADIENT_FACTOR = 4.0
"""Gradients pass through the rounded operations twice and through sums of many tokens."""

_TINY = 1e-30


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected| in float64; inf when a value is not finite on one side."""
    a, b = actual.detach().double(), expected.detach().double()
    same = a == b
    difference = torch.where(same, torch.zeros_like(a), a - b)
    norm = float(torch.where(b.isfinite(), b, torch.zeros_like(b)).norm())
    error = float(difference.norm())
    return error / max(norm, _TINY) if error == error else float("inf")
