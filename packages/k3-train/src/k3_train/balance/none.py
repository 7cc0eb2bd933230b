"""No balancing: the biases stay as they are (the baseline of an ablation)."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from k3_core.ops.route_topk import Routes
from k3_train.config import BalanceSection


class NoBalancer:
    """A balancer that does nothing."""

    def __init__(self, biases: Sequence[Tensor], *, top_k: int, settings: BalanceSection) -> None:
        del biases, top_k, settings

    def observe(self, router: int, routes: Routes, is_counted_T: Tensor | None = None) -> None:
        """Ignore the routes."""

    def update(self) -> None:
        """Leave the biases alone."""

    def forget(self) -> None:
        """There is nothing to forget."""

    def state_tensors(self) -> dict[str, Tensor]:
        """Nothing is remembered."""
        return {}

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Accept the empty state only."""
        if tensors:
            raise ValueError(f"balancer 'none' has no state, got {sorted(tensors)}")
