"""linear_cross_entropy in plain torch on any device, chunk by chunk.

C tokens of a chunk, D model width, T tokens, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3_kernels.linear_cross_entropy.chunks import Loss, op_by


def linear_cross_entropy(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    z_loss: float = 0.0,
) -> Tensor:
    """Cross-entropy of softmax(hidden @ weight^T) against `labels` [T]; as the reference.

    A label outside the vocabulary raises IndexError on a CPU, and stops a GPU by torch's assertion.
    """
    return _chunked(
        hidden_TD,
        weight_VD,
        labels_T,
        ignore_index=ignore_index,
        reduction=reduction,
        z_loss=z_loss,
    )


def softmax_rows(
    logits_CV: Tensor,
    labels_C: Tensor,
    losses_C: Tensor,
    scale_C: Tensor | None,
    *,
    loss: Loss,
    grad_dtype: torch.dtype | None,
) -> Tensor | None:
    """See `chunks.Rows`: softmax - onehot, times 1 + 2 z lse with a z-loss."""
    is_ignored_C = labels_C == loss.ignore_index
    labels_C1 = labels_C.masked_fill(is_ignored_C, 0).unsqueeze(1)
    logs_CV = torch.log_softmax(logits_CV, dim=1)
    own_C = logs_CV.gather(1, labels_C1).squeeze(1)
    torch.neg(own_C, out=losses_C)
    if loss.z_loss:
        lse_C = logits_CV.gather(1, labels_C1).squeeze(1) - own_C
        losses_C.addcmul_(lse_C, lse_C, value=loss.z_loss)
    losses_C.masked_fill_(is_ignored_C, 0.0)
    if grad_dtype is None:
        return None
    d_logits_CV = logs_CV.exp_()
    if loss.z_loss:
        d_logits_CV.mul_(lse_C.mul(2 * loss.z_loss).add_(1.0).unsqueeze(1))
    d_logits_CV.scatter_add_(1, labels_C1, d_logits_CV.new_full(labels_C1.shape, -1.0))
    if scale_C is not None:
        d_logits_CV.mul_(scale_C.unsqueeze(1))
    return d_logits_CV.masked_fill_(is_ignored_C.unsqueeze(1), 0.0).to(grad_dtype)


_chunked = op_by("linear_cross_entropy.cpu", softmax_rows)
