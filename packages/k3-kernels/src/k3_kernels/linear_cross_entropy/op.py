"""linear_cross_entropy on CUDA: torch's products, and one Triton kernel for a chunk of logits.

C tokens of a chunk, D model width, T tokens, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from k3_kernels.launch import check_floats
from k3_kernels.linear_cross_entropy.chunks import Loss, op_by
from k3_kernels.linear_cross_entropy.kernel import loss_kernel


class Tile(NamedTuple):
    """Logits of a step of a program, and warps."""

    block: int
    num_warps: int


TILE = Tile(16384, 32)


def linear_cross_entropy(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    z_loss: float = 0.0,
    logits_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Cross-entropy of softmax(hidden @ weight^T) against `labels` [T]; as the reference.

    `logits_dtype` may be that of 16-bit inputs: less memory and time, and gradients as exact as
    bfloat16 logits allow. A label outside the vocabulary gives NaN, in the loss and all gradients.
    """
    check_floats("linear_cross_entropy", hidden=hidden_TD, weight=weight_VD)
    if logits_dtype not in (torch.float32, hidden_TD.dtype):
        raise TypeError(
            f"linear_cross_entropy: logits_dtype {logits_dtype} is neither float32 nor that of "
            f"hidden, {hidden_TD.dtype}"
        )
    settings = {} if logits_dtype == torch.float32 else {"logits_dtype": logits_dtype}
    return _chunked(
        hidden_TD,
        weight_VD,
        labels_T,
        ignore_index=ignore_index,
        reduction=reduction,
        z_loss=z_loss,
        **settings,
    )


def kernel_rows(
    logits_CV: Tensor,
    labels_C: Tensor,
    losses_C: Tensor,
    scale_C: Tensor | None,
    *,
    loss: Loss,
    grad_dtype: torch.dtype | None,
) -> Tensor | None:
    """See `chunks.Rows`: gradients replace logits, narrower ones in halves of rows."""
    num_tokens, vocabulary = logits_CV.shape
    grads_CV = logits_CV
    if grad_dtype not in (None, logits_CV.dtype):
        grads_CV = logits_CV.view(grad_dtype)[:, vocabulary:]
    loss_kernel[(num_tokens,)](
        logits_CV,
        grads_CV,
        labels_C,
        losses_C,
        scale_C,
        vocabulary,
        logits_CV.stride(0),
        grads_CV.stride(0),
        loss.ignore_index,
        loss.z_loss,
        HAS_SCALE=scale_C is not None,
        HAS_GRADS=grad_dtype is not None,
        BLOCK=TILE.block,
        num_warps=TILE.num_warps,
    )
    return None if grad_dtype is None else grads_CV


_chunked = op_by("linear_cross_entropy.triton", kernel_rows)
