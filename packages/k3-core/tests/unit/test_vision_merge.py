"""Merging of image features into text, on cases small enough to write out."""

import pytest
import torch

from k3_core.vision import (
    VisionInputError,
    expand_ids,
    expand_labels,
    expand_placeholders,
    fill_placeholders,
    merge_batch,
    split_items,
)

PAD, MEDIA = 0, 9


def embed(ids: torch.Tensor) -> torch.Tensor:
    """An embedding that shows its id."""
    return torch.stack((ids, -ids), dim=-1).double()


def item(value: float, count: int) -> torch.Tensor:
    return torch.full((count, 2), value, dtype=torch.float64) + torch.arange(count)[:, None]


def test_one_sequence() -> None:
    ids = torch.tensor([5, 9, 6, 9])
    embeds, expansion = expand_placeholders(ids, embed(ids), [item(20, 3), item(30, 1)], MEDIA)
    assert embeds[:, 0].tolist() == [5, 20, 21, 22, 6, 30]
    assert expansion.index_X.tolist() == [0, 1, 1, 1, 2, 3]
    assert expansion.is_media_X.tolist() == [False, True, True, True, False, True]
    assert len(expansion) == 6
    labels = expand_labels(torch.tensor([1, 2, 3, 4]), expansion)
    assert labels.tolist() == [1, -100, -100, -100, 3, -100]


def test_expanded_ids_take_the_features_end_to_end() -> None:
    ids = torch.tensor([5, 9, 9, 9, 6, 9])
    filled = fill_placeholders(ids, embed(ids), [item(20, 3), item(30, 1)], MEDIA)
    assert filled[:, 0].tolist() == [5, 20, 21, 22, 6, 30]
    with pytest.raises(VisionInputError, match=r"4 placeholders .* for 3 positions of 1 images"):
        fill_placeholders(ids, embed(ids), [item(20, 3)], MEDIA)


def test_text_without_images_stays_as_it_is() -> None:
    ids = torch.tensor([5, 6])
    embeds, expansion = expand_placeholders(ids, embed(ids), [], MEDIA)
    assert torch.equal(embeds, embed(ids))
    assert expansion.index_X.tolist() == [0, 1]


def test_gradients_reach_text_and_images() -> None:
    ids = torch.tensor([5, 9, 6])
    text, image = embed(ids).requires_grad_(), item(1, 2).requires_grad_()
    embeds, _ = expand_placeholders(ids, text, [image], MEDIA)
    (embeds * torch.arange(1.0, 5)[:, None]).sum().backward()
    assert text.grad[:, 0].tolist() == [1, 0, 4]
    assert image.grad[:, 0].tolist() == [2, 3]


def test_rows_that_end_unmasked_are_padded_on_the_left() -> None:
    ids = torch.tensor([[PAD, 5, 9], [5, 6, 7]])
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    labels = torch.tensor([[1, 2, 3], [4, 5, 6]])
    merged = merge_batch(
        ids, embed(ids) + 1, [item(20, 2)], MEDIA, attention_mask_BT=mask, labels_BT=labels
    )
    assert merged.embeds_BXD[..., 0].tolist() == [[0, 6, 20, 21], [0, 6, 7, 8]]
    assert merged.attention_mask_BX.tolist() == [[0, 1, 1, 1], [0, 1, 1, 1]]
    assert merged.labels_BX.tolist() == [[-100, 2, -100, -100], [-100, 4, 5, 6]]


def test_rows_that_end_masked_are_padded_on_the_right() -> None:
    ids = torch.tensor([[9, 5, PAD], [5, 6, 7]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    merged = merge_batch(ids, embed(ids), [item(20, 2)], MEDIA, attention_mask_BT=mask)
    assert merged.embeds_BXD[..., 0].tolist() == [[20, 21, 5, 0], [5, 6, 7, 0]]
    assert merged.attention_mask_BX.tolist() == [[1, 1, 1, 0], [1, 1, 1, 0]]
    assert merged.labels_BX is None


def test_items_go_to_rows_in_order() -> None:
    ids = torch.tensor([[9, 5, 9], [6, 6, 9]])
    merged = merge_batch(ids, embed(ids), [item(20, 1), item(30, 1), item(40, 1)], MEDIA)
    assert merged.embeds_BXD[..., 0].tolist() == [[20, 5, 30], [6, 6, 40]]
    assert split_items(ids, 3, MEDIA) == [2, 1]


@pytest.mark.parametrize("counts", [[], [2, 2]])
def test_placeholders_without_items_and_items_without_placeholders(counts: list[int]) -> None:
    with pytest.raises(VisionInputError, match=rf"1 placeholders .* {len(counts)} images"):
        expand_ids(torch.tensor([5, 9]), counts, MEDIA)
    with pytest.raises(VisionInputError, match=f"{len(counts)} images"):
        split_items(torch.tensor([[5, 9]]), len(counts), MEDIA)


def test_an_empty_item_is_refused() -> None:
    with pytest.raises(VisionInputError, match="at least one position"):
        expand_ids(torch.tensor([5, 9]), [0], MEDIA)
