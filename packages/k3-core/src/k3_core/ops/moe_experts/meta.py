"""Results of moe_experts without values, for graphs."""

from __future__ import annotations

from torch import Tensor

from k3_core.ops.moe_experts.reference import Activation, Norm
from k3_core.ops.moe_experts.weights import ExpertStack


def meta(
    x_TD: Tensor,
    idx_Tk: Tensor,
    weight_Tk: Tensor,
    w1: ExpertStack,
    w3: ExpertStack,
    w2: ExpertStack,
    *,
    activation: Activation,
    norm: Norm | None = None,
    quantize_weights: bool = False,
    quantize_activations: bool = False,
) -> Tensor:
    """In the dtype of x, as wide as w2 makes it."""
    return x_TD.new_empty(x_TD.shape[0], w2.shape[1])
