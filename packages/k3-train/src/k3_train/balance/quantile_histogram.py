"""Quantile Balancing by histogram: the estimator of the report's training (report 4.2).

T tokens, L routers, E experts, B bins, m tokens of the step, q = m top_k / E.
Required biases r = cutoff - score are counted by the op that routes, or else here. The range of the
bins belongs to the biases of the step, so it is the same for all of its micro-batches, and
integer counts add up to the same bits however the tokens are split.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from k3_core.ops.route_topk import Routes
from k3_core.ops.route_topk.histogram import add_required_biases, bin_range
from k3_train.balance.quantile import check_top_k, moved
from k3_train.config import BalanceSection


class HistogramQuantileBalancer:
    """Moves every bias to the interpolated quantile of a histogram of required biases."""

    def __init__(self, biases: Sequence[Tensor], *, top_k: int, settings: BalanceSection) -> None:
        self.biases, self.ema = list(biases), settings.ema
        self.top_k = check_top_k(self.biases, top_k)
        self.num_bins = settings.num_bins
        self.histograms = [
            torch.zeros(len(bias_E), self.num_bins, dtype=torch.int32, device=bias_E.device)
            for bias_E in self.biases
        ]
        """Counts [E, B] of each router since the last update, a tensor each: a graph that writes
        some of them then need not know the others."""

    @property
    def counts_LEB(self) -> Tensor:
        """A copy of all counts."""
        if not self.histograms:
            return torch.zeros(0, 0, self.num_bins, dtype=torch.int32)
        return torch.stack(self.histograms)

    def observe(self, router: int, routes: Routes, is_counted_T: Tensor | None = None) -> None:
        """Count the required biases of one micro-batch; no value is read back from the device."""
        add_required_biases(self.histograms[router], routes, self.biases[router], is_counted_T)

    @torch.no_grad()
    def update(self) -> None:
        """Set the biases of the next step; a router that saw no token keeps its bias."""
        for bias_E, counts_EB in zip(self.biases, self.histograms, strict=True):
            # Every token is in one bin of each expert.
            num_routes = counts_EB[0].sum(dtype=torch.float64) * self.top_k
            # By a tensor: a GPU divides by a number with its reciprocal, which is rounded.
            target = num_routes / torch.full_like(num_routes, len(bias_E))
            low, width = (value.double() for value in bin_range(bias_E, self.num_bins))
            quantile_E = low + quantile_position(counts_EB, target) * width
            moved_E = moved(bias_E, quantile_E, self.ema).to(bias_E.dtype)
            bias_E.copy_(torch.where(num_routes > 0, moved_E, bias_E))
            counts_EB.zero_()

    def forget(self) -> None:
        """Drop the counts."""
        for counts_EB in self.histograms:
            counts_EB.zero_()

    def state_tensors(self) -> dict[str, Tensor]:
        """The counts and the numbers of tokens seen so far."""
        counts_LEB = self.counts_LEB
        return {"counts": counts_LEB, "num_tokens": counts_LEB[:, :1].sum((1, 2)).cpu()}

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what `state_tensors` gave; the numbers of tokens follow from the counts."""
        for histogram_EB, counts_EB in zip(self.histograms, tensors["counts"], strict=True):
            histogram_EB.copy_(counts_EB)


def quantile_position(counts_EB: Tensor, target: Tensor | float) -> Tensor:
    """Where a count of `target` is reached in each row, in bins from the lower end, float64 [E].

    First bin whose cumulative count is at least ceil(target), linear inside that bin.
    """
    target = torch.as_tensor(target, dtype=torch.float64, device=counts_EB.device)
    cumulative_EB = counts_EB.cumsum(-1, dtype=torch.int64)
    bin_E = (cumulative_EB < target.ceil()).sum(-1)
    inside_E = counts_EB.gather(-1, bin_E[:, None])[:, 0]
    before_E = cumulative_EB.gather(-1, bin_E[:, None])[:, 0] - inside_E
    return bin_E + ((target - before_E.double()) / inside_E).clamp(0, 1)
