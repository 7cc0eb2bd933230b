"""Counts of tokens per expert, kept on the device between two rows of the log.

T tokens, L routers, E experts, k routes a token. Reading them is the only place that waits for a
GPU.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from k3_core.ops.route_topk import Routes


@dataclass(frozen=True)
class LoadSummary:
    """The loads since the last summary.

    max_over_mean: of the worst router; 1 is perfect balance. num_dead: experts, over all
    routers, that got no token.
    """

    max_over_mean: float
    num_dead: int


@torch.no_grad()
def add_loads(counts_E: Tensor, routes: Routes, is_counted_T: Tensor | None = None) -> None:
    """Add to int64 counts how many routes each expert got, of the tokens that count."""
    idx_Tk = routes.idx_Tk
    one_Tk = torch.ones_like(idx_Tk)
    if is_counted_T is not None:
        one_Tk = one_Tk * is_counted_T[:, None]
    counts_E.scatter_add_(0, idx_Tk.flatten(), one_Tk.flatten())


class LoadTracker:
    """Accumulates how many routes every expert of every router got."""

    def __init__(self, num_routers: int, num_experts: int, device: torch.device) -> None:
        self.counts_LE = torch.zeros(num_routers, num_experts, dtype=torch.int64, device=device)

    def observe(self, router: int, routes: Routes, is_counted_T: Tensor | None = None) -> None:
        """Add the routes of one micro-batch, of the tokens that count."""
        add_loads(self.counts_LE[router], routes, is_counted_T)

    def summary(self) -> LoadSummary:
        """Summarise and start counting again; a model without routers reads 1.0 and 0."""
        counts_LE = self.counts_LE.cpu().double()
        self.counts_LE.zero_()
        return summarise(counts_LE[counts_LE.sum(-1) > 0])


def summarise(counts_LE: Tensor) -> LoadSummary:
    """The summary of counts [L, E] of routers that saw at least one token."""
    if not counts_LE.numel():
        return LoadSummary(1.0, 0)
    ratio_L = counts_LE.max(-1).values / counts_LE.mean(-1)
    return LoadSummary(float(ratio_L.max()), int((counts_LE == 0).sum()))
