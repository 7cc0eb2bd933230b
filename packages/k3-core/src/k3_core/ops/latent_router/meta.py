"""Results of latent_router without values, for graphs."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from k3_core.ops.math import math_dtype


def meta(x_TD: Tensor, latent_LD: Tensor, router_ED: Tensor) -> tuple[Tensor, Tensor]:
    """A linear layer's output, and logits in the math dtype."""
    shape = (*x_TD.shape[:-1], router_ED.shape[0])
    return F.linear(x_TD, latent_LD), x_TD.new_empty(shape, dtype=math_dtype(x_TD))
