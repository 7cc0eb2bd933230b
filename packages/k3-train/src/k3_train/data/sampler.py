"""Packed batches as a pure function of (seed, step): nothing to save, nothing to replay.

Each source is an endless stream: epoch after epoch, its pieces (documents, cut at `max_seq_len`)
in a permutation that depends on seed, source and epoch only; long documents may come several times
an epoch. A batch takes a fixed share of tokens from every source; a piece that the batch's end cuts
goes on, as its own sequence, in the next batch. Every token of an epoch is therefore seen exactly
once, or as often as its document. No end cuts a picture: one that would be cut comes whole in the
next piece or batch, so that what a batch has of a source differs from its share by less than a
picture.

T tokens, I pictures, P patches.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from k3_core.errors import K3Error
from k3_train.data.image_store import PIXELS, ImageStore, Integers
from k3_train.data.pieces import cut
from k3_train.data.token_file import TokenFile

IGNORE_INDEX = -100


@dataclass(frozen=True)
class BatchImages:
    """The pictures of a batch, in the order of its tokens."""

    patches: torch.Tensor  # [P, 3, height, width] uint8, not normalised
    grids: torch.Tensor  # [I, 3] int64: frames, rows and columns of patches
    spans: tuple[tuple[int, int], ...]  # of the text of each picture in the batch, [start, stop)

    def head(self, num_tokens: int) -> "BatchImages | None":
        """Those whose text is in the first `num_tokens` tokens."""
        count = bisect_right([stop for _, stop in self.spans], num_tokens)
        if not count:
            return None
        num_patches = int(self.grids[:count].prod(1).sum())
        return BatchImages(self.patches[:num_patches], self.grids[:count], self.spans[:count])


@dataclass(frozen=True)
class Batch:
    """One packed batch: T tokens in sequences of `seqlens`, targets already shifted."""

    input_ids: torch.Tensor  # [T] int64
    labels: torch.Tensor  # [T] int64, IGNORE_INDEX where there is no loss
    seqlens: tuple[int, ...]  # sums to T
    images: BatchImages | None = None

    def head(self, num_tokens: int) -> "Batch":
        """The first `num_tokens` tokens, in their sequences; fewer rather than cut a picture.

        A picture at the very beginning comes whole.
        """
        for start, stop in self.images.spans if self.images is not None else ():
            num_tokens = (start or stop) if start < num_tokens < stop else num_tokens
        lengths, left = [], num_tokens
        for length in self.seqlens:
            if left:
                lengths.append(min(length, left))
                left -= lengths[-1]
        taken = sum(lengths)
        images = self.images.head(taken) if self.images is not None else None
        return Batch(self.input_ids[:taken], self.labels[:taken], tuple(lengths), images)


class PackedSampler:
    """Batches of `tokens_per_batch` tokens, exactly where no picture is, from weighted token files.

    `weights` are shares of tokens (any scale); shares of a batch are whole numbers by largest
    remainder, so the mix is exact in every batch. `num_micro` is the number of micro-batches of
    one optimizer step. The label of a position is the next token of its document, also where a
    cut ends the sequence; the last token of a document has none, nor has a target whose mask is 0.
    Samplers of one `grain` (a multiple of their `max_seq_len`, which it is by default) cut the
    same streams into pieces of different lengths: one can go on at the offsets `starts` where
    another ended, and no token comes twice. Documents of `long_tokens` tokens or more come
    `long_repeats` times an epoch; 0 is no limit, and none is repeated.
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
        long_tokens: int = 0,
        long_repeats: int = 1,
    ) -> None:
        if not files or len(files) != len(weights):
            raise K3Error(f"{len(weights)} weights for {len(files)} token files: give one each")
        if min(weights) < 0 or sum(weights) <= 0:
            raise K3Error(f"weights {list(weights)} must be >= 0 with a positive sum")
        if min(tokens_per_batch, max_seq_len, num_micro, long_repeats) < 1:
            raise K3Error(
                f"tokens_per_batch {tokens_per_batch}, max_seq_len {max_seq_len}, "
                f"num_micro {num_micro} and long_repeats {long_repeats} must be at least 1"
            )
        self.grain, self.seed = max_seq_len if grain is None else grain, seed
        if self.grain % max_seq_len:
            raise K3Error(f"grain {grain} must be a multiple of max_seq_len {max_seq_len}")
        self.files = list(files)
        self.shares = _shares(weights, tokens_per_batch)
        self.starts = [0] * len(files) if starts is None else list(starts)
        self._streams = [
            _Stream(
                file,
                max_seq_len,
                self.grain,
                (seed, index),
                _repeats(file, long_tokens, long_repeats),
            )
            for index, file in enumerate(files)
        ]
        for file, share in zip(files, self.shares, strict=True):
            if share and not file.num_tokens:
                raise K3Error(f"{file.path} is empty: drop it or give it weight 0")
            if share and file.images.longest > share:
                raise K3Error(
                    f"a picture of {file.path} has {file.images.longest} tokens, more than the "
                    f"{share} that a batch takes of the file: make tokens_per_batch larger"
                )
        self._num_micro = num_micro

    def batch(self, step: int, micro: int = 0) -> Batch:
        """The batch of micro-step `micro` of optimizer step `step` (both from 0)."""
        if step < 0 or not 0 <= micro < self._num_micro:
            raise K3Error(f"step {step} must be >= 0 and micro {micro} in 0..{self._num_micro - 1}")
        position = step * self._num_micro + micro
        parts = [
            part
            for stream, share, start in zip(self._streams, self.shares, self.starts, strict=True)
            if share
            for part in stream.read(start + position * share, share)
        ]
        inputs, labels, lengths = (
            np.concatenate(arrays)
            for arrays in zip(*((one.ids, one.labels, one.lengths) for one in parts), strict=True)
        )
        return Batch(
            torch.from_numpy(inputs),
            torch.from_numpy(labels),
            tuple(lengths.tolist()),
            _batch_images(parts),
        )

    @property
    def has_images(self) -> bool:
        """Whether a file that batches take from has pictures."""
        used = (file for file, share in zip(self.files, self.shares, strict=True) if share)
        return any(len(file.images) for file in used)

    def offsets(self, step: int) -> list[int]:
        """How many tokens of each file's stream were read before `step`."""
        read = step * self._num_micro
        return [start + read * share for start, share in zip(self.starts, self.shares, strict=True)]

    def position(self, step: int) -> dict[str, object]:
        """Where `step` begins and what of, in JSON values; equal when the tokens are the same."""
        streams = {
            file.path.name: {"offset": offset, **_content(file)}
            for file, offset in zip(self.files, self.offsets(step), strict=True)
            if offset
        }
        return {"seed": self.seed, "grain": self.grain, "streams": streams}

    def source_tokens(self, step: int) -> dict[str, tuple[int, float]]:
        """(tokens, epochs) of each token file that were read before `step`."""
        return {
            file.path.name: (tokens, tokens / max(stream.num_tokens, 1))
            for file, stream, tokens in zip(
                self.files, self._streams, self.offsets(step), strict=True
            )
        }


class _Part(NamedTuple):
    """What one stream gives to a batch: T tokens, and (number, first token) of each picture."""

    ids: Integers
    labels: Integers
    lengths: Integers
    pictures: list[tuple[int, int]]
    store: ImageStore


class _Stream:
    """The endless token stream of one file: grains in a permutation, each cut into pieces.

    Document i comes `repeats[i]` times an epoch.
    """

    def __init__(
        self,
        file: TokenFile,
        max_seq_len: int,
        grain: int,
        seed: tuple[int, int],
        repeats: npt.NDArray[np.int64],
    ) -> None:
        self._file, self._seed = file, seed
        if file.images.longest > max_seq_len:
            raise K3Error(
                f"a picture of {file.path} has {file.images.longest} tokens, more than max_seq_len "
                f"{max_seq_len}, and pictures are not cut: make it larger"
            )
        starts = np.repeat(file.documents[:-1], repeats)
        ends = np.repeat(file.documents[1:], repeats)
        self.num_tokens = int((ends - starts).sum())
        firsts, lasts, document = cut(starts, ends, grain, file.images)
        self._start, stops, self._grain = cut(firsts, lasts, max_seq_len, file.images)
        self._length = stops - self._start
        self._stop = ends[document[self._grain]]  # end of the piece's document
        self._epoch = lru_cache(maxsize=2)(self._permute)

    def read(self, begin: int, count: int) -> Iterator[_Part]:
        """The `count` tokens from stream offset `begin`, a part an epoch.

        An end that cuts a picture moves to its start, as the beginning of the next reading does.
        """
        begin, end = self._before(begin), self._before(begin + count)
        while begin < end:
            epoch, offset = divmod(begin, self.num_tokens)
            taken = min(end - begin, self.num_tokens - offset)
            yield self._slice(epoch, offset, taken)
            begin += taken

    def _before(self, at: int) -> int:
        """Stream offset `at`, or that of the picture which an end there would cut."""
        if not len(self._file.images):
            return at
        epoch, offset = divmod(at, self.num_tokens)
        order, ends = self._epoch(epoch)
        piece = int(np.searchsorted(ends, offset, "right")) - 1
        place = self._start[order[piece]] + offset - ends[piece]  # in the file
        return at - int(place - self._file.images.before(place))

    def _permute(self, epoch: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        num_grains = int(self._grain[-1]) + 1 if len(self._grain) else 0
        grains = np.random.default_rng((*self._seed, epoch)).permutation(num_grains)
        place = np.empty_like(grains)
        place[grains] = np.arange(num_grains)
        order = np.argsort(place[self._grain], kind="stable")  # pieces of a grain stay in order
        return order, np.concatenate(([0], np.cumsum(self._length[order])))

    def _slice(self, epoch: int, offset: int, count: int) -> _Part:
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
        pictures = self._pictures(starts, begins - offset, lengths)
        ids = self._file.tokens[where].astype(np.int64)
        return _Part(ids, labels, lengths, pictures, self._file.images)

    def _pictures(
        self, starts: Integers, places: Integers, lengths: Integers
    ) -> list[tuple[int, int]]:
        """(number, first token) of the pictures of stretches of the file laid out at `places`."""
        images, found = self._file.images, list[tuple[int, int]]()
        if len(images):
            for start, place, length in zip(starts, places, lengths, strict=True):
                numbers = images.within(start, start + length)
                firsts = images.starts_N[numbers] - start + place
                found += zip(numbers.tolist(), firsts.tolist(), strict=True)
        return found


def _batch_images(parts: Sequence[_Part]) -> BatchImages | None:
    patches, grids, spans, at = [], [], [], 0
    for part in parts:
        store = part.store
        for number, first in part.pictures:
            patches.append(store.patches(number))
            grids.append(store.grids_N3[number])
            length = int(store.stops_N[number] - store.starts_N[number])
            spans.append((at + first, at + first + length))
        at += len(part.ids)
    if not spans:
        return None
    pixels, shapes = np.concatenate(patches), np.stack(grids)
    return BatchImages(torch.from_numpy(pixels), torch.from_numpy(shapes), tuple(spans))


def _content(file: TokenFile) -> dict[str, str]:
    """What identifies the tokens of a file, in whatever shards, and its pictures."""
    hashes = file.manifest["sha256"]
    shards = [value for name, value in sorted(hashes.items()) if name.startswith("tokens.")]
    joined = hashlib.sha256("".join(shards).encode()).hexdigest()
    pictures = {"pixels": hashes[PIXELS]} if PIXELS in hashes else {}
    return {"sha256": joined if len(shards) > 1 else shards[0], **pictures}


def _repeats(file: TokenFile, long_tokens: int, long_repeats: int) -> npt.NDArray[np.int64]:
    is_long = np.diff(file.documents) >= (long_tokens or np.inf)
    return np.where(is_long, long_repeats, 1)


def _shares(weights: Sequence[float], total: int) -> list[int]:
    exact = np.asarray(weights, dtype=np.float64) / sum(weights) * total
    shares = np.floor(exact).astype(int)
    missing = total - int(shares.sum())
    shares[np.argsort(shares - exact, kind="stable")[:missing]] += 1
    return [int(share) for share in shares]
