"""Reference of latent_router. T tokens, D model width, L latent width, E experts."""

from torch import Tensor
from torch.nn import functional as F

from k3_core.ops.math import math_dtype, without_autocast


def latent_router(x_TD: Tensor, latent_LD: Tensor, router_ED: Tensor) -> tuple[Tensor, Tensor]:
    """Latent [T, L] as a linear layer gives it, router logits [T, E] as `router_logits` does."""
    return F.linear(x_TD, latent_LD), router_logits(x_TD, router_ED)


def router_logits(x_TD: Tensor, router_ED: Tensor) -> Tensor:
    """[T, E] in float32 (float64 for float64 input), whatever autocast says (architecture 3)."""
    dtype = math_dtype(x_TD)
    with without_autocast(x_TD):
        return F.linear(x_TD.to(dtype), router_ED.to(dtype))
