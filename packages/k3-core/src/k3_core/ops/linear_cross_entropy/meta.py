"""Results of linear_cross_entropy without values, for graphs."""

from __future__ import annotations

from torch import Tensor

from k3_core.ops.math import math_dtype


def meta(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    z_loss: float = 0.0,
) -> Tensor:
    """One loss, or those of all tokens, in the math dtype."""
    shape = labels_T.shape if reduction == "none" else ()
    return hidden_TD.new_empty(shape, dtype=math_dtype(hidden_TD))
