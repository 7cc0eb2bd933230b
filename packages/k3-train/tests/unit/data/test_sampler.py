"""Packed batches against a slow enumeration of the documents."""

from collections import Counter
from pathlib import Path

import pytest
import torch

from k3_core.errors import K3Error
from k3_train.data.sampler import IGNORE_INDEX, Batch, PackedSampler
from k3_train.data.token_file import TokenFile, TokenFileWriter

LENGTHS = (1, 7, 20, 3, 5, 12)
VOCAB = 1000


@pytest.fixture
def file(tmp_path: Path) -> TokenFile:
    """Documents with unique tokens, so that a token names its place; every third has no loss."""
    total = sum(LENGTHS)
    with TokenFileWriter(tmp_path / "a", vocab_size=VOCAB, has_mask=True, sources={}) as out:
        out.add(range(total), LENGTHS, [token % 3 != 0 for token in range(total)])
    return TokenFile.open(tmp_path / "a")


@pytest.fixture
def other(tmp_path: Path) -> TokenFile:
    with TokenFileWriter(tmp_path / "b", vocab_size=VOCAB, has_mask=False, sources={}) as out:
        out.add(range(500, 530), [10, 20])
    return TokenFile.open(tmp_path / "b")


def expected_labels() -> dict[int, int]:
    """Token -> label, by walking over the documents."""
    labels, start = {}, 0
    for length in LENGTHS:
        for token in range(start, start + length):
            is_target = token + 1 < start + length and (token + 1) % 3 != 0
            labels[token] = token + 1 if is_target else IGNORE_INDEX
        start += length
    return labels


def sequences(batch: Batch) -> list[list[int]]:
    return [part.tolist() for part in torch.split(batch.input_ids, batch.seqlens)]


@pytest.mark.parametrize("tokens_per_batch", [6, 8, 48])
@pytest.mark.parametrize("max_seq_len", [1, 5, 100])
def test_an_epoch_has_every_token_once(
    file: TokenFile, tokens_per_batch: int, max_seq_len: int
) -> None:
    sampler = PackedSampler([file], [1.0], tokens_per_batch, max_seq_len, seed=3)
    labels, seen = expected_labels(), Counter[int]()
    for step in range(3 * file.num_tokens // tokens_per_batch):
        batch = sampler.batch(step)
        assert len(batch.input_ids) == sum(batch.seqlens) == tokens_per_batch
        assert batch.input_ids.dtype == batch.labels.dtype == torch.int64
        ids = batch.input_ids.tolist()
        assert batch.labels.tolist() == [labels[token] for token in ids]
        seen.update(ids)
        for sequence in sequences(batch):
            assert 1 <= len(sequence) <= max_seq_len
            assert sequence == list(range(sequence[0], sequence[-1] + 1))
            assert all(labels[t] in (t + 1, IGNORE_INDEX) for t in sequence)
            assert len({_document_of(token) for token in sequence}) == 1
    assert seen == Counter(dict.fromkeys(range(file.num_tokens), 3))


def _document_of(token: int) -> int:
    ends = [sum(LENGTHS[: i + 1]) for i in range(len(LENGTHS))]
    return next(i for i, end in enumerate(ends) if token < end)


def test_epochs_and_seeds_differ(file: TokenFile) -> None:
    one, two = (PackedSampler([file], [1], file.num_tokens, 5, seed=s) for s in (0, 1))
    orders = [sampler.batch(step).input_ids.tolist() for sampler in (one, two) for step in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4


def test_a_batch_does_not_depend_on_history(file: TokenFile, other: TokenFile) -> None:
    def make() -> PackedSampler:
        return PackedSampler([file, other], [1, 2], 10, 4, seed=5, num_micro=3)

    walked = make()
    straight = [walked.batch(step, micro) for step in range(12) for micro in range(3)]
    for step, micro in [(11, 2), (0, 0), (7, 1)]:
        fresh = make().batch(step, micro)
        again = straight[step * 3 + micro]
        assert torch.equal(fresh.input_ids, again.input_ids)
        assert torch.equal(fresh.labels, again.labels)
        assert fresh.seqlens == again.seqlens


def test_micro_batches_continue_the_stream(file: TokenFile) -> None:
    whole = PackedSampler([file], [1], 12, 5, seed=2)
    parts = PackedSampler([file], [1], 4, 5, seed=2, num_micro=3)
    for step in range(8):
        ids = torch.cat([parts.batch(step, micro).input_ids for micro in range(3)])
        assert torch.equal(ids, whole.batch(step).input_ids)


@pytest.mark.parametrize(
    "weights, shares",
    [
        ([1, 2], [3, 7]),
        ([0, 1], [0, 10]),
        ([0.5, 0.5], [5, 5]),
        ([9, 1], [9, 1]),
    ],
)
def test_token_shares_are_exact(
    file: TokenFile, other: TokenFile, weights: list[float], shares: list[int]
) -> None:
    sampler = PackedSampler([file, other], weights, 10, 4, seed=5)
    assert sampler.shares == shares
    for step in range(9):
        from_other = int((sampler.batch(step).input_ids >= 500).sum())
        assert from_other == shares[1]


def test_refusals(file: TokenFile) -> None:
    with pytest.raises(K3Error, match="weights"):
        PackedSampler([file], [1, 2], 10, 4, seed=0)
    with pytest.raises(K3Error, match="positive sum"):
        PackedSampler([file], [0], 10, 4, seed=0)
    with pytest.raises(K3Error, match="max_seq_len 0"):
        PackedSampler([file], [1], 10, 0, seed=0)
    with pytest.raises(K3Error, match="micro 1"):
        PackedSampler([file], [1], 10, 4, seed=0).batch(0, 1)
