"""Which activation an implementation of the experts may compute between its own products."""

from __future__ import annotations

from functools import partial

from k3_core.ops.moe_experts.reference import Activation


def situ_betas(activation: Activation) -> tuple[float, float | None] | None:
    """(beta, linear_beta) when the activation is a partial of situ_glu with just these."""
    if not isinstance(activation, partial) or activation.args:
        return None
    is_situ = getattr(activation.func, "__name__", "") == "situ_glu"
    if not is_situ or activation.keywords.keys() != {"beta", "linear_beta"}:
        return None
    return activation.keywords["beta"], activation.keywords["linear_beta"]
