"""Reference of linear_cross_entropy. T tokens, D model width, V vocabulary."""

import torch
from torch import Tensor
from torch.nn import functional as F

from k3_core.ops.math import math_dtype


def linear_cross_entropy(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    z_loss: float = 0.0,
) -> Tensor:
    """Cross-entropy of softmax(hidden @ weight^T) against `labels` [T] (int64).

    `reduction` is "mean" (over labels that are not `ignore_index`; 0 when there are none),
    "sum" or "none" ([T], zeros where ignored). Softmax in float32. `z_loss` times the squared
    logarithm of the softmax's denominator is added to the loss of each token.
    """
    check_reduction(reduction)
    logits_TV = F.linear(hidden_TD, weight_VD).to(math_dtype(hidden_TD))
    losses_T = F.cross_entropy(logits_TV, labels_T, ignore_index=ignore_index, reduction="none")
    is_ignored_T = labels_T == ignore_index
    if z_loss:
        squares_T = torch.logsumexp(logits_TV, dim=-1).square()
        losses_T = losses_T + (z_loss * squares_T).masked_fill(is_ignored_T, 0.0)
    if reduction == "none":
        return losses_T
    if reduction == "sum":
        return losses_T.sum()
    return losses_T.sum() / torch.clamp((~is_ignored_T).sum(), min=1)


def check_reduction(reduction: str) -> None:
    """Raise ValueError for a reduction that the op does not have."""
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction {reduction!r} is unknown; use 'mean', 'sum' or 'none'")
