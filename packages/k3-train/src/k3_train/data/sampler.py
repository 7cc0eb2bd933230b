"""Packed batches as a pure function of (seed, step): nothing to save, nothing to replay.

Each source is an endless stream: epoch after epoch, its pieces (documents, cut at `max_seq_len`)
in a permutation that depends on seed, source and epoch only. A batch takes a fixed share of
tokens from every source; a piece that the batch's end cuts goes on, as its own sequence, in the
next batch. Every token of an epoch is therefore seen exactly once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from k3_core.errors import K3Error
from k3_train.data.token_file import TokenFile

IGNORE_INDEX = -100


@dataclass(frozen=True)
class Batch:
    """One packed batch: T tokens in sequences of `seqlens`, targets already shifted."""

    input_ids: torch.Tensor  # [T] int64
    labels: torch.Tensor  # [T] int64, IGNORE_INDEX where there is no loss
    seqlens: tuple[int, ...]  # sums to T


class PackedSampler:
    """Batches of exactly `tokens_per_batch` tokens from weighted token files.

    `weights` are shares of tokens (any scale); shares of a batch are whole numbers by largest
    remainder, so the mix is exact in every batch. `num_micro` is the number of micro-batches of
    one optimizer step. The label of a position is the next token of its document, also where a
    cut ends the sequence; the last token of a document has none, nor has a target whose mask is 0.
    Samplers of one `grain` (a multiple of their `max_seq_len`, which it is by default) cut the
    same streams into pieces of different lengths: one can go on at the offsets `starts` where
    another ended, and no token comes twice.
    """

    def __init__(
        self,
        files: Sequence[TokenFile],
        weights: Sequence[float],
        tokens_per_batch: int,
        max_seq_len: int,
        seed: int,
        *,
        num_micro: int = 1,
        grain: int | None = None,
        starts: Sequence[int] | None = None,
    ) -> None:
        if not files or len(files) != len(weights):
            raise K3Error(f"{len(weights)} weights for {len(files)} token files: give one each")
        if min(weights) < 0 or sum(weights) <= 0:
            raise K3Error(f"weights {list(weights)} must be >= 0 with a positive sum")
        if min(tokens_per_batch, max_seq_len, num_micro) < 1:
            raise K3Error(
                f"tokens_per_batch {tokens_per_batch}, max_seq_len {max_seq_len} and "
                f"num_micro {num_micro} must be at least 1"
            )
        self.grain, self.seed = max_seq_len if grain is None else grain, seed
        if self.grain % max_seq_len:
            raise K3Error(f"grain {grain} must be a multiple of max_seq_len {max_seq_len}")
        self.files = list(files)
        self.shares = _shares(weights, tokens_per_batch)
        self.starts = [0] * len(files) if starts is None else list(starts)
        self._streams = [
            _Stream(file, max_seq_len, self.grain, (seed, index))
            for index, file in enumerate(files)
        ]
        for file, share in zip(files, self.shares, strict=True):
            if share and not file.num_tokens:
                raise K3Error(f"{file.path} is empty: drop it or give it weight 0")
        self._num_micro = num_micro

    def batch(self, step: int, micro: int = 0) -> Batch:
        """The batch of micro-step `micro` of optimizer step `step` (both from 0)."""
        if step < 0 or not 0 <= micro < self._num_micro:
            raise K3Error(f"step {step} must be >= 0 and micro {micro} in 0..{self._num_micro - 1}")
        position = step * self._num_micro + micro
        parts = [
            stream.read(start + position * share, share)
            for stream, share, start in zip(self._streams, self.shares, self.starts, strict=True)
            if share
        ]
        inputs, labels, lengths = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return Batch(torch.from_numpy(inputs), torch.from_numpy(labels), tuple(lengths.tolist()))

    def offsets(self, step: int) -> list[int]:
        """How many tokens of each file's stream were read before `step`."""
        read = step * self._num_micro
        return [start + read * share for start, share in zip(self.starts, self.shares, strict=True)]

    def position(self, step: int) -> dict[str, object]:
        """Where `step` begins and what of, in JSON values; equal when the tokens are the same."""
        streams = {
            file.path.name: {"offset": offset, "sha256": file.manifest["sha256"]["tokens.bin"]}
            for file, offset in zip(self.files, self.offsets(step), strict=True)
            if offset
        }
        return {"seed": self.seed, "grain": self.grain, "streams": streams}


class _Stream:
    """The endless token stream of one file: grains in a permutation, each cut into pieces."""

    def __init__(
        self, file: TokenFile, max_seq_len: int, grain: int, seed: tuple[int, int]
    ) -> None:
        self._file, self._seed = file, seed
        lengths = np.diff(file.documents)
        num_pieces = -(-lengths // max_seq_len)
        first = np.cumsum(num_pieces) - num_pieces
        rank = np.arange(num_pieces.sum()) - np.repeat(first, num_pieces)
        self._stop = np.repeat(file.documents[1:], num_pieces)  # end of the piece's document
        self._start = np.repeat(file.documents[:-1], num_pieces) + rank * max_seq_len
        is_first = rank % (grain // max_seq_len) == 0
        self._grain = np.cumsum(is_first) - 1  # number of the grain of each piece
        self._length = np.minimum(max_seq_len, self._stop - self._start)
        self._epoch = lru_cache(maxsize=2)(self._permute)

    def read(self, begin: int, count: int) -> tuple[npt.NDArray[np.int64], ...]:
        """(input ids [count], labels [count], sequence lengths) from stream offset `begin`."""
        found = []
        while count:
            epoch, offset = divmod(begin, self._file.num_tokens)
            taken = min(count, self._file.num_tokens - offset)
            found.append(self._slice(epoch, offset, taken))
            begin, count = begin + taken, count - taken
        return tuple(np.concatenate(arrays) for arrays in zip(*found, strict=True))

    def _permute(self, epoch: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        num_grains = int(self._grain[-1]) + 1 if len(self._grain) else 0
        grains = np.random.default_rng((*self._seed, epoch)).permutation(num_grains)
        place = np.empty_like(grains)
        place[grains] = np.arange(num_grains)
        order = np.argsort(place[self._grain], kind="stable")  # pieces of a grain stay in order
        return order, np.concatenate(([0], np.cumsum(self._length[order])))

    def _slice(self, epoch: int, offset: int, count: int) -> tuple[npt.NDArray[np.int64], ...]:
        order, ends = self._epoch(epoch)
        first = int(np.searchsorted(ends, offset, "right")) - 1
        last = int(np.searchsorted(ends, offset + count, "left"))
        pieces = order[first:last]
        begins = np.maximum(ends[first:last], offset)  # in the stream
        lengths = np.minimum(ends[first + 1 : last + 1], offset + count) - begins
        starts = self._start[pieces] + begins - ends[first:last]  # in the file
        where = np.arange(count) + np.repeat(starts - (begins - offset), lengths)
        has_next = where + 1 < np.repeat(self._stop[pieces], lengths)
        following = np.where(has_next, where + 1, where)
        if self._file.mask is not None:
            has_next &= self._file.mask[following] != 0
        labels = np.where(has_next, self._file.tokens[following].astype(np.int64), IGNORE_INDEX)
        return self._file.tokens[where].astype(np.int64), labels, lengths


def _shares(weights: Sequence[float], total: int) -> list[int]:
    exact = np.asarray(weights, dtype=np.float64) / sum(weights) * total
    shares = np.floor(exact).astype(int)
    missing = total - int(shares.sum())
    shares[np.argsort(shares - exact, kind="stable")[:missing]] += 1
    return [int(share) for share in shares]
