"""Pictures are never cut, lost or read twice, whatever the lengths of pieces and batches."""

import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from k3_train.data.image_store import EncodedPicture, ImageStore
from k3_train.data.pieces import cut
from k3_train.data.sampler import PackedSampler
from k3_train.data.token_file import TokenFile, TokenFileWriter

LONGEST = 6
# A document as pieces of text (True) and pictures, with their numbers of tokens.
DOCUMENT = st.lists(st.tuples(st.booleans(), st.integers(1, LONGEST)), min_size=1, max_size=8)
DOCUMENTS = st.lists(DOCUMENT, min_size=1, max_size=6)


def write(folder: str, documents: list[list[tuple[bool, int]]]) -> TokenFile:
    """Every token names its place; a picture of n tokens has n mod 3 + 1 patches of its number."""
    place = count = 0
    with TokenFileWriter(
        Path(folder) / "file", vocab_size=1000, has_mask=False, sources={}, has_images=True
    ) as out:
        for document in documents:
            start, pictures = place, []
            for is_text, length in document:
                if not is_text:
                    patches = np.full((length % 3 + 1, 3, 2, 2), count, np.uint8)
                    span = place - start, place - start + length
                    pictures.append(EncodedPicture(*span, (len(patches), 1, 1), patches))
                    count += 1
                place += length
            out.add(range(start, place), [place - start], images=pictures)
    return TokenFile.open(Path(folder) / "file")


@given(DOCUMENTS, st.integers(LONGEST, 20), st.integers(LONGEST, 30), st.integers(0, 3))
def test_every_token_and_every_picture_comes_once_an_epoch(
    documents: list[list[tuple[bool, int]]], max_seq_len: int, tokens: int, seed: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = write(folder, documents)
        store, total = file.images, file.num_tokens
        sampler = PackedSampler([file], [1], tokens, max_seq_len, seed)
        seen, shown = Counter[int](), Counter[int]()
        for step in range(total):  # `tokens` epochs
            batch = sampler.batch(step)
            ids = batch.input_ids.tolist()
            assert len(ids) == sum(batch.seqlens) and abs(len(ids) - tokens) < LONGEST
            assert min(batch.seqlens) > 0 and max(batch.seqlens) <= max_seq_len
            seen.update(ids)
            left, at = Counter(ids), 0
            for (start, stop), grid in zip(*_pictures(batch), strict=True):
                number = int(batch.images.patches[at, 0, 0, 0])
                whole = list(range(store.starts_N[number], store.stops_N[number]))
                assert ids[start:stop] == whole
                assert grid == store.grids_N3[number].tolist()
                assert (batch.images.patches[at : at + grid[0]] == number).all()
                left.subtract(whole)
                shown[number] += 1
                at += grid[0]
            in_pictures = set[int]()
            for first, last in zip(store.starts_N, store.stops_N, strict=True):
                in_pictures.update(range(first, last))
            assert not any(left[token] for token in in_pictures)
        assert seen == dict.fromkeys(range(total), tokens)
        assert shown == dict.fromkeys(range(len(store)), tokens)


def _pictures(batch) -> tuple[list[tuple[int, int]], list[list[int]]]:
    if batch.images is None:
        return [], []
    return list(batch.images.spans), batch.images.grids.tolist()


@given(DOCUMENTS, st.integers(1, 3), st.integers(LONGEST, 20), st.integers(1, 9), st.data())
def test_a_stage_goes_on_where_another_ended_and_any_order_reads_the_same(
    documents: list[list[tuple[bool, int]]],
    multiple: int,
    max_seq_len: int,
    steps: int,
    data: st.DataObject,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = write(folder, documents)
        grain, tokens = multiple * max_seq_len, data.draw(st.integers(LONGEST, 20))
        long = PackedSampler([file], [1], tokens, grain, 0)
        first = PackedSampler([file], [1], 7, max_seq_len, 0, grain=grain)
        second = PackedSampler(
            [file], [1], tokens, grain, 0, grain=grain, starts=first.offsets(steps)
        )
        ids = [first.batch(step).input_ids for step in range(steps)]
        ids += [second.batch(step).input_ids for step in range(3)]
        joined = torch.cat(ids)
        straight = torch.cat([long.batch(i).input_ids for i in range(len(joined) // tokens + 2)])
        assert torch.equal(joined, straight[: len(joined)])
        step = data.draw(st.integers(0, 2))
        again = PackedSampler(
            [file], [1], tokens, grain, 0, grain=grain, starts=first.offsets(steps)
        ).batch(step)
        assert torch.equal(again.input_ids, second.batch(step).input_ids)


@given(st.lists(st.integers(1, 40), max_size=10), st.integers(1, 12))
def test_text_is_cut_at_multiples_of_the_length(lengths: list[int], length: int) -> None:
    ends = np.cumsum(lengths, dtype=np.int64)
    starts = ends - lengths
    begins, stops, parents = cut(starts, ends, length, ImageStore.open(Path(), {}))
    expected = [
        (at, min(at + length, end), number)
        for number, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True))
        for at in range(start, end, length)
    ]
    assert list(zip(begins.tolist(), stops.tolist(), parents.tolist(), strict=True)) == expected
