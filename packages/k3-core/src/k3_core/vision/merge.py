"""Image features in place of placeholder ids (architecture 5, "Merging into text").

Every placeholder id in a sequence stands for one item and grows to that item's number of
positions; mask, labels and embeddings grow with it. The functions on one sequence serve packed
input; `merge_batch` does padded batches with them.

Legend: B batch, T positions before and X after the expansion, D text width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from k3_core.vision.grid import VisionInputError


@dataclass(frozen=True)
class Expansion:
    """Where every position of an expanded sequence comes from.

    index_X: position in the sequence before; is_media_X: true at positions of an item.
    """

    index_X: Tensor
    is_media_X: Tensor

    def __len__(self) -> int:
        return self.index_X.shape[0]


def expand_ids(input_ids_T: Tensor, counts: Sequence[int], placeholder_id: int) -> Expansion:
    """The expansion of one sequence whose i-th placeholder grows to `counts[i]` positions.

    `input_ids_T[expansion.index_X]` repeats the placeholder; so grow masks and labels.
    Raises `VisionInputError` unless there is one count, at least 1, for every placeholder.
    """
    is_placeholder_T = input_ids_T == placeholder_id
    num_placeholders = int(is_placeholder_T.sum())
    if num_placeholders != len(counts):
        raise VisionInputError(
            f"{num_placeholders} placeholders (id {placeholder_id}) but {len(counts)} images; "
            "write exactly one placeholder for every image or video chunk, in order"
        )
    if any(count < 1 for count in counts):
        raise VisionInputError(f"counts {list(counts)}: an item has at least one position")
    device = input_ids_T.device
    repeats_T = torch.ones_like(input_ids_T)
    repeats_T[is_placeholder_T] = torch.tensor(counts, device=device, dtype=input_ids_T.dtype)
    positions_T = torch.arange(input_ids_T.shape[0], device=device)
    index_X = torch.repeat_interleave(positions_T, repeats_T)
    return Expansion(index_X, is_placeholder_T[index_X])


def expand_placeholders(
    input_ids_T: Tensor, embeds_TD: Tensor, features: Sequence[Tensor], placeholder_id: int
) -> tuple[Tensor, Expansion]:
    """Embeddings [X, D] of one sequence with `features[i]` [n_i, D] at its i-th placeholder.

    Gradients reach both the embeddings and the features. Features are cast to the embeddings'
    dtype. Raises `VisionInputError` when placeholders and items differ in number.
    """
    expansion = expand_ids(input_ids_T, [item.shape[0] for item in features], placeholder_id)
    ids_X, embeds_XD = input_ids_T[expansion.index_X], embeds_TD[expansion.index_X]
    if features:
        embeds_XD = fill_placeholders(ids_X, embeds_XD, features, placeholder_id)
    return embeds_XD, expansion


def fill_placeholders(
    input_ids_X: Tensor, embeds_XD: Tensor, features: Sequence[Tensor], placeholder_id: int
) -> Tensor:
    """Embeddings [X, D] with the features end to end where the expanded ids are placeholders.

    Gradients reach both. Features are cast to the embeddings' dtype. Raises `VisionInputError`
    when there are not as many placeholders as features.
    """
    features_MD = torch.cat(list(features)).to(embeds_XD)
    where = (input_ids_X == placeholder_id).nonzero(as_tuple=True)
    if len(where[0]) != len(features_MD):
        raise VisionInputError(
            f"{len(where[0])} placeholders (id {placeholder_id}) for {len(features_MD)} positions "
            f"of {len(features)} images; repeat each image's placeholder once a position, in order"
        )
    return embeds_XD.index_put(where, features_MD)


def expand_labels(labels_T: Tensor, expansion: Expansion, ignore_index: int = -100) -> Tensor:
    """Labels [X]: image positions are never predicted, so they hold `ignore_index`."""
    return labels_T[expansion.index_X].masked_fill(expansion.is_media_X, ignore_index)


def split_items(input_ids_BT: Tensor, num_items: int, placeholder_id: int) -> list[int]:
    """Items of every row, for items listed row after row; their sum must be `num_items`."""
    per_row = (input_ids_BT == placeholder_id).sum(1).tolist()
    if sum(per_row) != num_items:
        raise VisionInputError(
            f"the rows hold {per_row} placeholders (id {placeholder_id}) but there are "
            f"{num_items} images; write exactly one placeholder for every image, in order"
        )
    return per_row


@dataclass(frozen=True)
class MergedBatch:
    """A padded batch after the expansion; every field has the expanded length X.

    Embeddings are zero and labels `ignore_index` where the mask is 0.
    """

    embeds_BXD: Tensor
    attention_mask_BX: Tensor
    labels_BX: Tensor | None


def merge_batch(
    input_ids_BT: Tensor,
    embeds_BTD: Tensor,
    features: Sequence[Tensor],
    placeholder_id: int,
    *,
    attention_mask_BT: Tensor | None = None,
    labels_BT: Tensor | None = None,
    ignore_index: int = -100,
) -> MergedBatch:
    """Expands every row and pads the rows to one length again.

    Rows are padded on the right if any row ends in a masked position, else on the left, the
    side where generation needs them. Items are listed row after row. Raises `VisionInputError`
    when placeholders and items differ in number.
    """
    mask_BT = torch.ones_like(input_ids_BT) if attention_mask_BT is None else attention_mask_BT
    is_left = bool(mask_BT[:, -1].all())
    per_row = split_items(input_ids_BT, len(features), placeholder_id)
    embeds, masks, labels, start = [], [], [], 0
    for row, num_items in enumerate(per_row):
        items = features[start : start + num_items]
        start += num_items
        ids_T = input_ids_BT[row]
        embeds_XD, expansion = expand_placeholders(ids_T, embeds_BTD[row], items, placeholder_id)
        mask_X = mask_BT[row][expansion.index_X]
        embeds.append(embeds_XD.masked_fill((mask_X == 0)[:, None], 0.0))
        masks.append(mask_X)
        if labels_BT is not None:
            labels_X = expand_labels(labels_BT[row], expansion, ignore_index)
            labels.append(labels_X.masked_fill(mask_X == 0, ignore_index))
    mask_BX = _pad(masks, is_left, 0)
    labels_BX = _pad(labels, is_left, ignore_index) if labels else None
    return MergedBatch(_pad(embeds, is_left, 0), mask_BX, labels_BX)


def _pad(rows: list[Tensor], is_left: bool, value: int) -> Tensor:
    side = "left" if is_left else "right"
    return torch.nn.utils.rnn.pad_sequence(
        rows, batch_first=True, padding_value=value, padding_side=side
    )
