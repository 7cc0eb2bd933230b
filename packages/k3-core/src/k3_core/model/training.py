"""The training loss over a packed batch: next token, and the MTP layer's token after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from k3_core.model.batch import SequenceBatch

if TYPE_CHECKING:
    from k3_core.model.k3 import K3ForConditionalGeneration


def training_loss(
    model: K3ForConditionalGeneration,
    input_ids_T: Tensor,
    labels_T: Tensor,
    batch: SequenceBatch,
    mtp_weight: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """See `K3ForConditionalGeneration.training_loss`."""
    ignore = model.config.ignore_index
    out = model.forward_packed(input_ids_T, batch, output_logits=False)
    loss = model.ops.linear_cross_entropy(
        out.hidden_TD, model.language_model.lm_head.weight, labels_T, ignore_index=ignore
    )
    metrics = {"loss": loss.detach()}
    if mtp_weight > 0:
        next_ids_T = _shift_left(input_ids_T, batch, fill=0)
        mtp_labels_T = _shift_left(labels_T, batch, fill=ignore)
        _, normed_TD = model.mtp_hidden(next_ids_T, out.mix_TD, batch)
        mtp_loss = model.ops.linear_cross_entropy(
            normed_TD, model.mtp_head_weight(), mtp_labels_T, ignore_index=ignore
        )
        metrics["mtp_loss"] = mtp_loss.detach()
        loss = loss + mtp_weight * mtp_loss
    return loss, metrics


def _shift_left(x_T: Tensor, batch: SequenceBatch, fill: int) -> Tensor:
    """x[t + 1] within each sequence, `fill` at its last token."""
    shifted = torch.cat((x_T[1:], x_T.new_full((1,), fill)))
    ends = batch.cu_seqlens_N1[1:] - 1
    is_last = torch.zeros_like(x_T, dtype=torch.bool)
    is_last[ends.clamp(min=0)] = True
    return shifted.masked_fill(is_last, fill)
