"""SequenceBatch: which packed tokens belong to which sequence, and where their caches are.

The one input that training, prefill, decode and mixed batches share (design 4). T packed
tokens, N sequences, N1 = N + 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from k3_core.cache.base import Cache


@dataclass(frozen=True)
class SequenceBatch:
    """N sequences laid one after the other in a packed batch of T tokens."""

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
    ) -> SequenceBatch:
        """Build a batch from host lengths.

        With a cache, `slots` defaults to 0..N-1 and `starts` to what the cache holds. Raises
        ValueError for a negative length or slots that do not fit.
        """
        lengths = tuple(int(length) for length in seqlens)
        if any(length < 0 for length in lengths):
            raise ValueError(f"sequence lengths must not be negative, got {lengths}")
        chosen = _check_slots(lengths, cache, slots)
        if starts is None:
            starts = [0] * len(lengths) if cache is None else [cache.lengths[s] for s in chosen]
        offsets = torch.tensor((0, *lengths), dtype=torch.int64).cumsum(0)
        return cls(
            seqlens=lengths,
            cu_seqlens_N1=offsets.to(device, non_blocking=True),
            starts=tuple(starts),
            cache=cache,
            slots=chosen,
            routes=dict(routes or {}),
        )

    @property
    def num_tokens(self) -> int:
        """T."""
        return sum(self.seqlens)

    @property
    def is_decode(self) -> bool:
        """True when every sequence continues its cache by exactly one token."""
        return self.cache is not None and all(length == 1 for length in self.seqlens)

    @cached_property
    def slots_N(self) -> Tensor:
        """The cache slots as int64 [N] on the batch's device."""
        return torch.tensor(self.slots, dtype=torch.int64, device=self.cu_seqlens_N1.device)

    @cached_property
    def total_lengths(self) -> tuple[int, ...]:
        """Length of each sequence after this batch."""
        return tuple(s + n for s, n in zip(self.starts, self.seqlens, strict=True))

    @cached_property
    def cu_total_N1(self) -> Tensor:
        """int64 offsets of the whole sequences, cached tokens included."""
        offsets = torch.tensor((0, *self.total_lengths), dtype=torch.int64).cumsum(0)
        return offsets.to(self.cu_seqlens_N1.device)

    @cached_property
    def is_first_T(self) -> Tensor:
        """Boolean [T], true at position 0 of a sequence."""
        mask = torch.zeros(self.num_tokens, dtype=torch.bool)
        offset = 0
        for start, length in zip(self.starts, self.seqlens, strict=True):
            if start == 0 and length > 0:
                mask[offset] = True
            offset += length
        return mask.to(self.cu_seqlens_N1.device)


def _check_slots(
    lengths: tuple[int, ...], cache: Cache | None, slots: Sequence[int] | None
) -> tuple[int, ...]:
    if cache is None:
        if slots is not None:
            raise ValueError("slots were given without a cache; pass cache=model.new_cache(...)")
        return ()
    chosen = tuple(range(len(lengths)) if slots is None else slots)
    allowed = len(cache.lengths)
    if len(chosen) != len(lengths) or len(set(chosen)) != len(chosen):
        raise ValueError(f"{len(lengths)} sequences need as many distinct slots, got {chosen}")
    if any(not 0 <= slot < allowed for slot in chosen):
        raise ValueError(f"slots {chosen} are not all in 0..{allowed - 1}, the cache's slots")
    return chosen
