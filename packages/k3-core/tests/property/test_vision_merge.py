"""Merging images into text against a plain loop over Python lists."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from k3_core.vision import expand_ids, expand_labels, expand_placeholders, merge_batch

MEDIA = 7
IDS = st.lists(st.integers(0, MEDIA), min_size=1, max_size=12)


def features_for(ids: list[int], data: st.DataObject) -> list[torch.Tensor]:
    counts = data.draw(
        st.lists(st.integers(1, 4), min_size=ids.count(MEDIA), max_size=ids.count(MEDIA))
    )
    return [torch.randn(count, 3, dtype=torch.float64) for count in counts]


def by_loop(ids: list[int], embeds: torch.Tensor, features: list[torch.Tensor]) -> list[tuple]:
    """(source position, is media, vector) of every expanded position."""
    rows, items = [], iter(features)
    for position, token in enumerate(ids):
        vectors = next(items) if token == MEDIA else [embeds[position]]
        rows += [(position, token == MEDIA, vector) for vector in vectors]
    return rows


@given(IDS, st.data())
def test_one_sequence_equals_the_loop(ids: list[int], data: st.DataObject) -> None:
    features, embeds = features_for(ids, data), torch.randn(len(ids), 3, dtype=torch.float64)
    expected = by_loop(ids, embeds, features)
    found, expansion = expand_placeholders(torch.tensor(ids), embeds, features, MEDIA)
    assert expansion.index_X.tolist() == [row[0] for row in expected]
    assert expansion.is_media_X.tolist() == [row[1] for row in expected]
    assert torch.equal(found, torch.stack([row[2] for row in expected]))
    labels = expand_labels(torch.tensor(ids), expansion).tolist()
    assert labels == [-100 if is_media else ids[source] for source, is_media, _ in expected]


@given(IDS, st.data())
def test_expanding_twice_is_expanding_once(ids: list[int], data: st.DataObject) -> None:
    counts = [len(item) for item in features_for(ids, data)]
    ids_T = torch.tensor(ids)
    once = ids_T[expand_ids(ids_T, counts, MEDIA).index_X]
    again = expand_ids(once, [1] * sum(counts), MEDIA)
    assert again.index_X.tolist() == list(range(len(once)))
    assert len(once) == len(ids) - len(counts) + sum(counts)


@given(st.lists(IDS, min_size=1, max_size=4), st.booleans(), st.data())
def test_a_padded_batch_holds_every_row_alone(
    rows: list[list[int]], is_left: bool, data: st.DataObject
) -> None:
    per_row = [features_for(row, data) for row in rows]
    embeds = [torch.randn(len(row), 3, dtype=torch.float64) for row in rows]
    longest = max(map(len, rows))
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask, padded = torch.zeros_like(ids), torch.full((*ids.shape, 3), 5.0, dtype=torch.float64)
    for index, row in enumerate(rows):
        place = slice(longest - len(row), None) if is_left else slice(0, len(row))
        ids[index, place], mask[index, place] = torch.tensor(row), 1
        padded[index, place] = embeds[index]
    merged = merge_batch(
        ids, padded, [item for items in per_row for item in items], MEDIA,
        attention_mask_BT=mask, labels_BT=ids,
    )  # fmt: skip
    for index, row in enumerate(rows):
        alone, _ = expand_placeholders(torch.tensor(row), embeds[index], per_row[index], MEDIA)
        keep = merged.attention_mask_BX[index] == 1
        assert torch.equal(merged.embeds_BXD[index, keep], alone)
        assert (merged.embeds_BXD[index, ~keep] == 0).all()
        assert (merged.labels_BX[index, ~keep] == -100).all()
