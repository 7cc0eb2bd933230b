"""Reference of linear: torch's own product, on every device. T tokens, I input, O output width."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def linear(
    x: Tensor,
    weight_OI: Tensor,
    *,
    add_to: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """x W^T: [..., I] -> [..., O]; plus `add_to` [T, O], then x is [T, I].

    `dtype` is that of the result, if not that of x; then sums need not be rounded to that of x.
    Without gradients the sum may be made in the memory of `add_to`, which is not to be used again.
    """
    if add_to is None:
        y = F.linear(x, weight_OI)
        return y if dtype is None else y.to(dtype)
    if torch.is_grad_enabled() or not add_to.dtype == x.dtype == weight_OI.dtype:
        return add_to + F.linear(x, weight_OI)
    return add_to.addmm_(x, weight_OI.t())
