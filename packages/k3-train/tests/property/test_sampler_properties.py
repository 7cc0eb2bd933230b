"""The sampler is a function of (seed, step): order, ranks, resuming, epochs (training 5, 19-22)."""

import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from k3_train.data.sampler import Batch, PackedSampler
from k3_train.data.token_file import TokenFile, TokenFileWriter

LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=10)


def write(folder: str, lengths: list[int], shard_tokens: int | None = None) -> TokenFile:
    """Every token names its own place."""
    path = Path(folder) / f"file-{shard_tokens}"
    with TokenFileWriter(
        path, vocab_size=1000, has_mask=False, sources={}, shard_tokens=shard_tokens
    ) as out:
        start = 0
        for length in lengths:
            out.add(range(start, start + length), [length])
            start += length
    return TokenFile.open(path)


def same(one: Batch, two: Batch) -> bool:
    return (
        torch.equal(one.input_ids, two.input_ids)
        and torch.equal(one.labels, two.labels)
        and one.seqlens == two.seqlens
    )


@given(LENGTHS, st.integers(1, 9), st.integers(1, 30), st.integers(0, 3), st.data())
def test_any_order_of_reading_gives_the_same_batches(
    lengths: list[int], max_seq_len: int, tokens: int, seed: int, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = write(folder, lengths)
        straight = [
            PackedSampler([file], [1], tokens, max_seq_len, seed).batch(i) for i in range(8)
        ]
        resumed = PackedSampler([file], [1], tokens, max_seq_len, seed)
        for step in data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=8)):
            assert same(resumed.batch(step), straight[step])


@given(LENGTHS, st.integers(1, 6), st.integers(1, 4), st.integers(2, 9), st.integers(0, 3))
def test_ranks_that_share_a_step_read_what_one_rank_reads(
    lengths: list[int], tokens: int, num_ranks: int, max_seq_len: int, seed: int
) -> None:
    """A step of R micro-batches may be read by 1 or R ranks: nothing is lost or read twice."""
    with tempfile.TemporaryDirectory() as folder:
        file = write(folder, lengths)
        whole = PackedSampler([file], [1], tokens * num_ranks, max_seq_len, seed)
        ranks = [
            PackedSampler([file], [1], tokens, max_seq_len, seed, num_micro=num_ranks)
            for _ in range(num_ranks)
        ]
        for step in range(5):
            parts = [sampler.batch(step, rank).input_ids for rank, sampler in enumerate(ranks)]
            assert torch.equal(torch.cat(parts), whole.batch(step).input_ids)


@given(
    LENGTHS, st.integers(1, 9), st.integers(1, 13), st.integers(1, 3), st.integers(1, 3), st.data()
)
def test_epochs_have_every_token_as_often_as_its_document(
    lengths: list[int],
    max_seq_len: int,
    long_tokens: int,
    long_repeats: int,
    num_epochs: int,
    data: st.DataObject,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = write(folder, lengths)
        document = np.repeat(np.arange(len(lengths)), lengths)
        times = [long_repeats if length >= long_tokens else 1 for length in lengths]
        total = sum(n * length for n, length in zip(times, lengths, strict=True))
        tokens = data.draw(st.sampled_from([d for d in range(1, total + 1) if total % d == 0]))
        sampler = PackedSampler(
            [file], [1], tokens, max_seq_len, 0, long_tokens=long_tokens, long_repeats=long_repeats
        )
        seen = Counter[int]()
        for step in range(num_epochs * total // tokens):
            seen.update(sampler.batch(step).input_ids.tolist())
        expected = {token: num_epochs * times[doc] for token, doc in enumerate(document.tolist())}
        assert seen == expected
        steps = num_epochs * total // tokens
        assert sampler.source_tokens(steps) == {file.path.name: (num_epochs * total, num_epochs)}


@given(LENGTHS, st.integers(1, 20), st.integers(1, 30), st.integers(1, 9))
def test_shards_do_not_change_a_batch(
    lengths: list[int], shard_tokens: int, tokens: int, max_seq_len: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        files = write(folder, lengths), write(folder, lengths, shard_tokens)
        samplers = [PackedSampler([file], [1], tokens, max_seq_len, 1) for file in files]
        assert all(same(samplers[0].batch(i), samplers[1].batch(i)) for i in range(4))
        sizes = files[1].manifest["shards"]
        assert sum(sizes) == sum(lengths) and all(size >= shard_tokens for size in sizes[:-1])
        files[1].verify()
