"""Results of linear without values, for graphs."""

from __future__ import annotations

import torch
from torch import Tensor


def meta(
    x: Tensor,
    weight_OI: Tensor,
    *,
    add_to: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """In `dtype` or that of x, as wide as the weight makes it."""
    return x.new_empty(*x.shape[:-1], weight_OI.shape[0], dtype=dtype)
