"""What both estimators of Quantile Balancing share. E experts."""

from collections.abc import Sequence

from torch import Tensor


def moved(bias_E: Tensor, quantile_E: Tensor, ema: float) -> Tensor:
    """The new biases: the centred quantiles, of which `ema` leaves that share of the old biases.

    The old biases are the moving mean, so it needs no state of its own. Float64.
    """
    quantile_E = quantile_E.double()
    centred_E = quantile_E - quantile_E.mean()
    return ema * bias_E.double() + (1 - ema) * centred_E if ema else centred_E


def check_top_k(biases: Sequence[Tensor], top_k: int) -> int:
    """`top_k`, if it leaves a cutoff in every router; all routers have the same experts."""
    sizes = {len(bias_E) for bias_E in biases}
    if len(sizes) > 1:
        raise ValueError(f"the routers have different numbers of experts: {sorted(sizes)}")
    if sizes and not 1 <= top_k < min(sizes):
        raise ValueError(
            f"quantile balancing needs 1 <= top_k < experts, got top_k {top_k} of {min(sizes)}; "
            "with every expert chosen there is nothing to balance: use balance.name = 'none'"
        )
    return top_k
