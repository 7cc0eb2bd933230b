"""Quantile Balancing by histogram: the estimator of the report's training (report 4.2).

T tokens, L routers, E experts, B bins, m tokens of the step, q = m top_k / E.
Required biases r = cutoff - score lie in [b_min - 1, b_max + 1] because scores lie in (0, 1).
The range belongs to the biases of the step, so it is the same for all of its micro-batches, and
integer counts add up to the same bits however the tokens are split.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from k3_core.ops.route_topk import Routes
from k3_train.balance.quantile_exact import check_top_k, required_biases


class HistogramQuantileBalancer:
    """Moves every bias to the interpolated quantile of a histogram of required biases."""

    def __init__(self, biases: Sequence[Tensor], *, top_k: int, num_bins: int) -> None:
        if num_bins < 1:
            raise ValueError(f"balance.num_bins must be at least 1, got {num_bins}")
        self.biases = list(biases)
        self.top_k = check_top_k(self.biases, top_k)
        self.num_bins = num_bins
        num_experts = len(self.biases[0]) if self.biases else 0
        shape = (len(self.biases), num_experts, num_bins)
        device = self.biases[0].device if self.biases else None
        self.counts_LEB = torch.zeros(shape, dtype=torch.int32, device=device)
        self._num_tokens = [0] * len(self.biases)

    @torch.no_grad()
    def observe(self, router: int, routes: Routes) -> None:
        """Count the required biases of one micro-batch; no value is read back from the device."""
        low, width = self._range(self.biases[router])
        # A NaN would index outside the counts, which kills a GPU's context; the loop reports it.
        bin_TE = ((required_biases(routes) - low) / width).nan_to_num_().floor_()
        bin_TE = bin_TE.clamp_(0, self.num_bins - 1)
        offset_E = torch.arange(len(self.biases[router]), device=low.device) * self.num_bins
        index = (bin_TE.long() + offset_E).flatten()
        one = torch.ones((), dtype=torch.int32, device=low.device)
        self.counts_LEB[router].view(-1).scatter_add_(0, index, one.expand_as(index))
        self._num_tokens[router] += len(routes.cutoff_T)

    @torch.no_grad()
    def update(self) -> None:
        """Set the biases of the next step; a router that saw no token keeps its bias."""
        for router, bias_E in enumerate(self.biases):
            if self._num_tokens[router]:
                target = self._num_tokens[router] * self.top_k / len(bias_E)
                low, width = (value.double() for value in self._range(bias_E))
                position_E = quantile_position(self.counts_LEB[router], target)
                quantile_E = low + position_E * width
                bias_E.copy_(quantile_E - quantile_E.mean())
        self.counts_LEB.zero_()
        self._num_tokens = [0] * len(self.biases)

    def state_tensors(self) -> dict[str, Tensor]:
        """The counts and the numbers of tokens seen so far."""
        return {"counts": self.counts_LEB, "num_tokens": torch.tensor(self._num_tokens)}

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what `state_tensors` gave."""
        self.counts_LEB.copy_(tensors["counts"])
        self._num_tokens = tensors["num_tokens"].tolist()

    def _range(self, bias_E: Tensor) -> tuple[Tensor, Tensor]:
        """Lower end and bin width of the histogram, 0-dimensional tensors on the device."""
        low, high = torch.aminmax(bias_E.detach())
        return low - 1, (high - low + 2) / self.num_bins


def quantile_position(counts_EB: Tensor, target: float) -> Tensor:
    """Where a count of `target` is reached in each row, in bins from the lower end, float64 [E].

    First bin whose cumulative count is at least ceil(target), linear inside that bin.
    """
    cumulative_EB = counts_EB.cumsum(-1, dtype=torch.int64)
    bin_E = (cumulative_EB < math.ceil(target)).sum(-1)
    inside_E = counts_EB.gather(-1, bin_E[:, None])[:, 0]
    before_E = cumulative_EB.gather(-1, bin_E[:, None])[:, 0] - inside_E
    return bin_E + ((target - before_E.double()) / inside_E).clamp(0, 1)
