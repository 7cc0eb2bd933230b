"""What Quantile Balancing learns from routes: a histogram of required biases (report 4.2).

T tokens, E experts, B bins. The bias with which token t would just be routed to expert e is
r = cutoff - score. As scores lie in (0, 1), it lies in [min b - 1, max b + 1] for the biases b that
the routes were chosen with; B bins divide this range evenly. The counts are integers, so they do
not depend on the order or the split of the tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from k3_core.ops.route_topk import Routes


def bin_range(bias_E: Tensor, num_bins: int) -> tuple[Tensor, Tensor]:
    """Lower end of the first bin and width of the bins, 0-dimensional tensors on the device."""
    low, high = torch.aminmax(bias_E.detach())
    return low - 1, (high - low + 2) / num_bins


def required_biases(routes: Routes) -> Tensor:
    """r [T, E] = cutoff - score: the bias with which an expert would just be chosen."""
    return routes.cutoff_T.detach()[:, None] - routes.scores_TE.detach()


@torch.no_grad()
def add_required_biases(
    histogram_EB: Tensor, routes: Routes, bias_E: Tensor, is_counted_T: Tensor | None = None
) -> None:
    """Count the required biases of the routes in place; no value is read back from the device.

    Tokens that are not counted (bool [T]) add nothing; each of the others adds one to every expert.
    NaN counts in the first bin, what lies outside the range in the bin next to it.
    """
    check_histogram(histogram_EB, routes.scores_TE, is_counted_T)
    num_experts, num_bins = histogram_EB.shape
    low, width = bin_range(bias_E, num_bins)
    # A NaN would index outside the counts, which kills a GPU's context.
    bin_TE = ((required_biases(routes) - low) / width).nan_to_num_().floor_()
    bin_TE = bin_TE.clamp_(0, num_bins - 1)
    one = bin_TE.new_ones((), dtype=torch.int32)
    one_T = one if is_counted_T is None else is_counted_T.to(torch.int32)
    histogram_EB.scatter_add_(1, bin_TE.T.long(), one_T.expand(num_experts, len(bin_TE)))


def check_histogram(histogram_EB: Tensor, scores_TE: Tensor, is_counted_T: Tensor | None) -> None:
    """Raise ValueError for a histogram or a mask that does not fit the scores."""
    num_tokens, num_experts = scores_TE.shape
    is_whole = histogram_EB.dtype == torch.int32 and histogram_EB.is_contiguous()
    if histogram_EB.dim() != 2 or len(histogram_EB) != num_experts or not is_whole:
        raise ValueError(
            f"route_topk: the histogram is {histogram_EB.dtype} {tuple(histogram_EB.shape)}; it "
            f"must be contiguous, int32 and [{num_experts}, bins]"
        )
    if is_counted_T is None:
        return
    if is_counted_T.dtype != torch.bool or is_counted_T.shape != (num_tokens,):
        raise ValueError(
            f"route_topk: is_counted_T is {is_counted_T.dtype} {tuple(is_counted_T.shape)}; it "
            f"must be bool and [{num_tokens}], one flag a token"
        )
