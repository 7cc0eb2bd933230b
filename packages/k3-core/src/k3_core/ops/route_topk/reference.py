"""Reference of route_topk. T tokens, E experts, k routes a token, G groups, B bins."""

import torch
from torch import Tensor

from k3_core.ops.route_topk import Routes
from k3_core.ops.route_topk.histogram import add_required_biases


def route_topk(
    logits_TE: Tensor,
    bias_E: Tensor,
    *,
    top_k: int,
    renormalize: bool,
    scaling_factor: float,
    num_groups: int = 1,
    topk_groups: int = 1,
    activation: str = "sigmoid",
    histogram_EB: Tensor | None = None,
    is_counted_T: Tensor | None = None,
) -> Routes:
    """Top-k of score + bias; the bias serves the choice only, weights come from raw scores.

    With several groups, a group's score is the sum of its best two biased scores and only
    `topk_groups` groups stay eligible. Raises ValueError for k out of range or NaN logits'
    shape errors; NaN scores are never chosen before finite ones.

    histogram_EB: int32, to which the required biases of the tokens are added, see
    `route_topk.histogram`; every call counts, a recomputation too. is_counted_T: bool, False at
    tokens that it leaves out (padding), which get routes all the same.
    """
    num_tokens, num_experts = logits_TE.shape
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"route_topk: top_k {top_k} is not in 1..{num_experts} (the experts)")
    scores_TE = route_scores(logits_TE, activation)
    biased_TE = (scores_TE + bias_E.to(scores_TE.dtype)).detach()
    biased_TE = biased_TE.masked_fill(biased_TE.isnan(), float("-inf"))
    if num_groups > 1:
        biased_TE = _keep_best_groups(biased_TE, num_groups, topk_groups, top_k)
    best = biased_TE.topk(min(top_k + 1, num_experts), dim=-1)
    idx_Tk = best.indices[:, :top_k]
    if top_k < num_experts:
        cutoff_T = best.values[:, top_k]
    else:
        cutoff_T = biased_TE.new_full((num_tokens,), float("-inf"))
    weight_Tk = route_weights(scores_TE, idx_Tk, renormalize, scaling_factor)
    routes = Routes(idx_Tk, weight_Tk, scores_TE, cutoff_T)
    if histogram_EB is not None:
        add_required_biases(histogram_EB, routes, bias_E, is_counted_T)
    return routes


def route_weights(scores_TE: Tensor, idx_Tk: Tensor, renormalize: bool, scaling: float) -> Tensor:
    """Mixture weights [T, k] of given experts; also what replayed routes use."""
    weight_Tk = scores_TE.gather(-1, idx_Tk)
    if renormalize:
        weight_Tk = weight_Tk / (weight_Tk.sum(-1, keepdim=True) + 1e-20)
    return weight_Tk * scaling


def route_scores(logits_TE: Tensor, activation: str) -> Tensor:
    """Unbiased scores of all experts; raises ValueError for an unknown activation."""
    if activation == "sigmoid":
        return logits_TE.sigmoid()
    if activation == "softmax":
        return logits_TE.softmax(-1)
    raise ValueError(f"router activation {activation!r} is unknown; use 'sigmoid' or 'softmax'")


def _keep_best_groups(biased_TE: Tensor, num_groups: int, topk_groups: int, top_k: int) -> Tensor:
    num_tokens, num_experts = biased_TE.shape
    size = num_experts // num_groups
    if num_experts % num_groups or not 1 <= topk_groups <= num_groups or top_k > topk_groups * size:
        raise ValueError(
            f"route_topk: {num_experts} experts in {num_groups} groups, {topk_groups} kept, do not "
            f"hold top_k {top_k}; groups must divide the experts and hold at least top_k of them"
        )
    grouped = biased_TE.view(num_tokens, num_groups, size)
    group_scores = grouped.topk(min(2, size), dim=-1).values.sum(-1)
    kept = group_scores.topk(topk_groups, dim=-1).indices
    is_kept = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(1, kept, True)
    return grouped.masked_fill(~is_kept[..., None], float("-inf")).view(num_tokens, num_experts)
