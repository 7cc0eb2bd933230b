"""The sign rule of DeepSeek-V3 (arXiv 2408.15664), the baseline of Quantile Balancing.

L routers, E experts. The bias of an expert with less than the mean load rises by a fixed rate, that
of one with more sinks by it; a step on the dual of balanced assignment (report 4.2).
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from k3_core.ops.route_topk import Routes
from k3_train.balance.load import add_loads
from k3_train.config import BalanceSection


class SignBalancer:
    """Moves every bias by `balance.sign_rate` once a step, then centres the mean.

    Without the centre the mean of the biases drifts, as more experts lie below the mean load than
    above it (training 5, row 13).
    """

    def __init__(self, biases: Sequence[Tensor], *, top_k: int, settings: BalanceSection) -> None:
        del top_k
        self.biases, self.rate = list(biases), settings.sign_rate
        self.counts = [
            torch.zeros(len(bias_E), dtype=torch.int64, device=bias_E.device)
            for bias_E in self.biases
        ]

    def observe(self, router: int, routes: Routes, is_counted_T: Tensor | None = None) -> None:
        """Count the routes of one micro-batch."""
        add_loads(self.counts[router], routes, is_counted_T)

    @torch.no_grad()
    def update(self) -> None:
        """Move the biases; a router that saw no token keeps its own."""
        for bias_E, counts_E in zip(self.biases, self.counts, strict=True):
            # In whole numbers: the mean times E is the sum.
            excess_E = counts_E * len(counts_E) - counts_E.sum()
            moved_E = bias_E.double() - self.rate * excess_E.sign()
            moved_E -= moved_E.mean()
            bias_E.copy_(torch.where(counts_E.sum() > 0, moved_E.to(bias_E.dtype), bias_E))
        self.forget()

    def forget(self) -> None:
        """Drop the counts."""
        for counts_E in self.counts:
            counts_E.zero_()

    def state_tensors(self) -> dict[str, Tensor]:
        """The counts since the last update."""
        return {f"counts.{index}": counts_E for index, counts_E in enumerate(self.counts)}

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what `state_tensors` gave."""
        for name, counts_E in self.state_tensors().items():
            counts_E.copy_(tensors[name])
