"""Results of rms_norm without values, for graphs."""

from __future__ import annotations

from torch import Tensor


def meta(x: Tensor, weight_D: Tensor, *, eps: float) -> Tensor:
    """As `x`."""
    return x.new_empty(x.shape)
