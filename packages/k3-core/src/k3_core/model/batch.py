"""SequenceBatch: which packed tokens belong to which sequence, and where their caches are.

The one input that training, prefill, decode and mixed batches share (design 4). T packed
tokens, N sequences, N1 = N + 1, E checkpoints, H heads, V and K head dims, C channels, J = W - 1
inputs that a convolution of W taps remembers. P patches, I images.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, takewhile
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from functools import cached_property as kept

    from k3_core.cache.base import Cache
else:

    class kept:
        """functools.cached_property without its lock, which torch.compile cannot trace; in a graph
        the value is made where it is used, and not kept."""

        def __init__(self, function: Callable[[Any], Any]) -> None:
            self.function, self.__doc__ = function, function.__doc__

        def __set_name__(self, owner: type, name: str) -> None:
            self.name = name

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            if instance is None:
                return self
            value = self.function(instance)
            if not torch.compiler.is_compiling():
                instance.__dict__[self.name] = value
            return value


PADDED = -1
"""The slot of a row that only fills a batch up: nothing of it reaches another sequence."""


class Checkpoints(Protocol):
    """Takes the states that KDA layers have after chosen tokens of a batch (report 5.4)."""

    offsets: tuple[tuple[int, ...], ...]
    """For each sequence of the batch, increasing numbers of its tokens, from 1 on. E in all."""

    def put(self, layer: int, states_EHVK: Tensor, windows_ECJ: Tensor) -> None:
        """Called once a KDA layer, in the order of the offsets."""
        ...


class PackedImages(NamedTuple):
    """The images and video chunks of a packed batch, in the order of its tokens."""

    pixel_values: Tensor
    """Patches [P, 3, height, width] in [-1, 1], on any device."""
    grid_thws: Tensor
    """Integers [I, 3]: frames, rows and columns of patches."""


@dataclass(frozen=True)
class SequenceBatch:
    """N sequences laid one after the other in a packed batch of T tokens.

    The first `num_decode` sequences continue their caches by one token each: attention takes
    them through its decode ops and the rest through its prefill ops, in one forward. When
    `is_verify`, they have one or a few tokens, of which the last may turn out wrong: the forward
    leaves their recurrent states and lengths as they are until `accept` says how many count.
    """

    seqlens: tuple[int, ...]
    """New tokens of each sequence; their sum is T. A length may be 0."""
    cu_seqlens_N1: Tensor
    """int64 offsets on the model's device, 0 first and T last."""
    starts: tuple[int, ...]
    """Tokens of each sequence that its cache already holds (0 without a cache)."""
    cache: Cache | None = None
    """None for training and for a plain forward pass."""
    slots: tuple[int, ...] = ()
    """The cache slot of each sequence."""
    routes: Mapping[int, Tensor | tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Replayed routing by 0-based layer: expert indices [T, k] (weights then follow from the
    current router), or a pair of indices and weights."""
    num_decode: int = 0
    """Leading sequences that the decode ops take, of one token unless `is_verify`; needs a
    cache."""
    checkpoints: Checkpoints | None = None
    """Where KDA states inside the batch go; offsets of decoding sequences are empty."""
    is_verify: bool = False
    """Whether the decoding sequences end in drafted tokens (speculative decoding)."""
    replays: list[Callable[[Tensor], None]] = field(default_factory=list)
    """A verify forward adds one a recurrent layer: it moves the states of the decoding sequences
    by the given numbers of their tokens, int64 [num_decode]."""
    is_counted_T: Tensor | None = None
    """Bool, False at tokens of a training batch that only fill it up, which load balancing does not
    count. None counts all."""
    images: PackedImages | None = None
    """Pictures among the tokens, whose ids hold the placeholder once for each position of one."""
    found: dict[str, Any] = field(default_factory=dict)
    """What a cache looks up once for all layers of the forward, by names of its own."""

    @classmethod
    def from_lengths(
        cls,
        seqlens: Sequence[int],
        *,
        device: torch.device | str = "cpu",
        cache: Cache | None = None,
        slots: Sequence[int] | None = None,
        starts: Sequence[int] | None = None,
        routes: Mapping[int, Tensor | tuple[Tensor, Tensor]] | None = None,
        num_decode: int | None = None,
        checkpoints: Checkpoints | None = None,
        is_verify: bool = False,
        is_counted_T: Tensor | None = None,
        images: PackedImages | None = None,
    ) -> SequenceBatch:
        """Build a batch from host lengths.

        With a cache, `slots` defaults to 0..N-1, `starts` to what the cache holds, and
        `num_decode` to the number of leading sequences of one token; `is_verify` allows any
        number of tokens, from one on. Slot -1 is a padded row. Raises ValueError for a negative
        length, slots or a `num_decode` that do not fit.
        """
        lengths = tuple(int(length) for length in seqlens)
        if any(length < 0 for length in lengths):
            raise ValueError(f"sequence lengths must not be negative, got {lengths}")
        chosen = _check_slots(lengths, cache, slots)
        if starts is None:
            starts = [0] * len(lengths) if cache is None else [cache.lengths[s] for s in chosen]
        num_decode = _check_decode(lengths, cache, num_decode, is_verify)
        offsets = torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int64)
        return cls(
            seqlens=lengths,
            cu_seqlens_N1=offsets.to(device, non_blocking=True),
            starts=tuple(starts),
            cache=cache,
            slots=chosen,
            routes=dict(routes or {}),
            num_decode=num_decode,
            checkpoints=checkpoints,
            is_verify=is_verify,
            is_counted_T=is_counted_T,
            images=images,
        )

    @classmethod
    def of_rows(
        cls, slots_N: Tensor, positions_N: Tensor, cache: Cache, most_tokens: int
    ) -> SequenceBatch:
        """One more token for each of N sequences whose slots and positions only the device knows.

        What a CUDA graph replays: both tensors (int64) may change between replays, as long as no
        sequence gets longer than `most_tokens`.
        """
        count = len(slots_N)
        batch = cls(
            seqlens=(1,) * count,
            cu_seqlens_N1=torch.arange(count + 1, device=slots_N.device),
            starts=(most_tokens - 1,) * count,
            cache=cache,
            slots=(PADDED,) * count,
            num_decode=count,
        )
        known = {"slots_N": slots_N, "slots_T": slots_N, "positions_T": positions_N}
        vars(batch).update(known, lengths_N=positions_N + 1)
        return batch

    @property
    def num_tokens(self) -> int:
        """T."""
        return sum(self.seqlens)

    @kept
    def num_decode_tokens(self) -> int:
        """Tokens of the decoding sequences, which come first."""
        return sum(self.seqlens[: self.num_decode])

    @property
    def is_decode(self) -> bool:
        """True when every sequence continues its cache through the decode ops."""
        return self.cache is not None and self.num_decode == len(self.seqlens)

    @kept
    def decoding(self) -> SequenceBatch:
        """The first `num_decode` sequences, without routes."""
        return self if self.is_decode else self._part(0, self.num_decode)

    @kept
    def prefilling(self) -> SequenceBatch:
        """The sequences behind the first `num_decode`, without routes and checkpoints."""
        return self if self.num_decode == 0 else self._part(self.num_decode, len(self.seqlens))

    def _part(self, first: int, last: int) -> SequenceBatch:
        """Sequences first:last."""
        return SequenceBatch(
            seqlens=self.seqlens[first:last],
            cu_seqlens_N1=self.cu_seqlens_N1[first : last + 1] - sum(self.seqlens[:first]),
            starts=self.starts[first:last],
            cache=self.cache,
            slots=self.slots[first:last],
            num_decode=max(self.num_decode - first, 0),
            is_verify=self.is_verify,
        )

    def accept(self, counts: Sequence[int]) -> None:
        """Makes the first `counts[i]` tokens of decoding sequence i final, after a verify forward.

        States and convolution windows move by as many tokens; latents of the others are
        overwritten by what comes next.
        """
        assert self.cache is not None and self.is_verify
        num_accepted_B = torch.tensor(tuple(counts), dtype=torch.int64)
        num_accepted_B = num_accepted_B.to(self.cu_seqlens_N1.device, non_blocking=True)
        for replay in self.replays:
            replay(num_accepted_B)
        self.cache.advance(self.slots[: self.num_decode], tuple(counts))

    @kept
    def slots_N(self) -> Tensor:
        """The cache slots as int64 [N] on the batch's device."""
        return torch.tensor(self.slots, dtype=torch.int64, device=self.cu_seqlens_N1.device)

    @kept
    def total_lengths(self) -> tuple[int, ...]:
        """Length of each sequence after this batch."""
        return tuple(s + n for s, n in zip(self.starts, self.seqlens, strict=True))

    @kept
    def cu_total_N1(self) -> Tensor:
        """int64 offsets of the whole sequences, cached tokens included."""
        offsets = torch.tensor((0, *self.total_lengths), dtype=torch.int64).cumsum(0)
        return offsets.to(self.cu_seqlens_N1.device)

    @kept
    def lengths_N(self) -> Tensor:
        """`total_lengths` as int64 [N] on the batch's device."""
        return self.cu_total_N1.diff()

    @kept
    def slots_T(self) -> Tensor:
        """The cache slot of each token, int64 [T]."""
        counts = zip(self.slots, self.seqlens, strict=True)
        return self._per_token([slot for slot, count in counts for _ in range(count)])

    @kept
    def positions_T(self) -> Tensor:
        """The position of each token in its sequence, int64 [T]."""
        spans = zip(self.starts, self.total_lengths, strict=True)
        return self._per_token([t for start, stop in spans for t in range(start, stop)])

    @kept
    def sequence_T(self) -> Tensor:
        """The sequence of each token, int64 [T]."""
        return self._per_token([n for n, count in enumerate(self.seqlens) for _ in range(count)])

    def rows(self, x_T: Tensor) -> Tensor:
        """[T, ...] -> [N, W, ...] with W the longest length; shorter ones repeat their last token.

        Lengths are at least 1.
        """
        if len(set(self.seqlens)) == 1:
            return x_T.unflatten(0, (len(self.seqlens), -1))
        return x_T[self._row_index_NW]

    def tokens(self, x_NW: Tensor) -> Tensor:
        """The inverse of `rows`."""
        if len(set(self.seqlens)) == 1:
            return x_NW.flatten(0, 1)
        return x_NW[self.sequence_T, self.positions_T - self._starts_N[self.sequence_T]]

    @kept
    def _starts_N(self) -> Tensor:
        return self._per_token(list(self.starts))

    @kept
    def _row_index_NW(self) -> Tensor:
        offset, width, index = 0, max(self.seqlens), []
        for length in self.seqlens:
            index.append([offset + min(w, length - 1) for w in range(width)])
            offset += length
        return torch.tensor(index, dtype=torch.int64).to(self.cu_seqlens_N1.device)

    def _per_token(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self.cu_seqlens_N1.device)

    @kept
    def is_first_T(self) -> Tensor:
        """Boolean [T], true at position 0 of a sequence."""
        mask = torch.zeros(self.num_tokens, dtype=torch.bool)
        offset = 0
        for start, length in zip(self.starts, self.seqlens, strict=True):
            if start == 0 and length > 0:
                mask[offset] = True
            offset += length
        return mask.to(self.cu_seqlens_N1.device)


def _check_decode(
    lengths: tuple[int, ...], cache: Cache | None, num_decode: int | None, is_verify: bool
) -> int:
    """The number of decoding sequences, by default that of leading sequences of one token."""
    fits = (lambda n: n >= 1) if is_verify else (lambda n: n == 1)
    leading = sum(1 for _ in takewhile(fits, lengths)) if cache is not None else 0
    if num_decode is None:
        return leading
    if not 0 <= num_decode <= leading:
        kind = "some tokens" if is_verify else "one token"
        raise ValueError(
            f"num_decode {num_decode} is not in 0..{leading}, the leading sequences of {kind} "
            f"with a cache; the lengths are {lengths}"
        )
    return num_decode


def _check_slots(
    lengths: tuple[int, ...], cache: Cache | None, slots: Sequence[int] | None
) -> tuple[int, ...]:
    if cache is None:
        if slots is not None:
            raise ValueError("slots were given without a cache; pass cache=model.new_cache(...)")
        return ()
    chosen = tuple(range(len(lengths)) if slots is None else slots)
    allowed = len(cache.lengths)
    live = [slot for slot in chosen if slot != PADDED]
    if len(chosen) != len(lengths) or len(set(live)) != len(live):
        raise ValueError(f"{len(lengths)} sequences need as many distinct slots, got {chosen}")
    if any(not 0 <= slot < allowed for slot in live):
        raise ValueError(f"slots {chosen} are not all in 0..{allowed - 1}, the cache's slots")
    return chosen
