"""Quantile Balancing with the exact quantile (report 4.2, training 3.1).

T tokens, L routers, E experts, k routes a token, m tokens of the step, q = m k / E.
The bias that would just route token i to expert j is r_ij = cutoff_i - score_ij. The new bias of
an expert is the (floor(q)+1)-th smallest r over all tokens: minus the (q+1)-th largest margin.
It keeps the r of a whole step in memory; the histogram estimator does not.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from k3_core.ops.route_topk import Routes
from k3_core.ops.route_topk.histogram import required_biases
from k3_train.balance.quantile import check_top_k, moved
from k3_train.config import BalanceSection


class ExactQuantileBalancer:
    """Moves every bias to the exact quantile of the required biases, then centres the mean."""

    def __init__(self, biases: Sequence[Tensor], *, top_k: int, settings: BalanceSection) -> None:
        self.biases, self.ema = list(biases), settings.ema
        self.top_k = check_top_k(self.biases, top_k)
        self._required: list[list[tuple[Tensor, Tensor | None]]] = [[] for _ in self.biases]

    def observe(self, router: int, routes: Routes, is_counted_T: Tensor | None = None) -> None:
        """Keep the required biases [T, E] of one micro-batch."""
        self._required[router].append((required_biases(routes), is_counted_T))

    @torch.no_grad()
    def update(self) -> None:
        """Set the biases of the next step; a router that saw no token keeps its bias."""
        for bias_E, parts in zip(self.biases, self._required, strict=True):
            required_TE = _joined(parts) if parts else None
            if required_TE is not None and len(required_TE):
                rank = len(required_TE) * self.top_k // len(bias_E) + 1
                quantile_E = required_TE.kthvalue(rank, dim=0).values
                bias_E.copy_(moved(bias_E, quantile_E, self.ema))
            parts.clear()

    def forget(self) -> None:
        """Drop what was kept."""
        for parts in self._required:
            parts.clear()

    def state_tensors(self) -> dict[str, Tensor]:
        """The required biases seen so far, per router."""
        return {
            f"required.{index}": _joined(parts)
            for index, parts in enumerate(self._required)
            if parts
        }

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what `state_tensors` gave."""
        self._required = [[] for _ in self.biases]
        for name, required_TE in tensors.items():
            index = int(name.removeprefix("required."))
            self._required[index].append((required_TE.to(self.biases[index].device), None))


def _joined(parts: Sequence[tuple[Tensor, Tensor | None]]) -> Tensor:
    """Required biases of all parts, of the tokens that count: this waits for a GPU."""
    return torch.cat([part if keep is None else part[keep] for part, keep in parts])
