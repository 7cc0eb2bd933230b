"""The values that the prefix index hands out: checkpoints, matches, eviction events, counters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

CheckpointKind = Literal["head", "prompt", "turn", "junction", "interval", "moving"]
"""Why a checkpoint was taken: end of the stable head (tools, effort, first system message), last
unit of a prompt, end of a turn, where siblings part, every so many tokens, or `moving`: the
latest state of a running request, which the next one supersedes."""

CHECKPOINT_KINDS: tuple[str, ...] = get_args(CheckpointKind)


class StaleMatch(RuntimeError):
    """Something of a match was evicted between `lookup` and `claim`; look up again."""


@dataclass(eq=False)
class Checkpoint:
    """The KDA states and convolution windows after a prefix; read-only for everybody.

    The extent is allocated, moved and evicted as one, so that all KDA layers of a checkpoint
    exist or none.
    """

    key: bytes
    num_tokens: int
    extent: tuple[int, ...]
    kind: str
    num_hits: int = 0
    last_use: int = 0
    """In pages allocated by the index so far."""
    is_alive: bool = field(default=True, repr=False)
    above: Checkpoint | None = field(default=None, repr=False)
    """A shallower checkpoint of the chain; read it through `next_shallower`."""

    @property
    def next_shallower(self) -> Checkpoint | None:
        """The deepest surviving checkpoint of a shorter prefix. Amortised O(log n)."""
        passed = []
        above = self.above
        while above is not None and not above.is_alive:
            passed.append(above)
            above = above.above
        for gone in passed:
            gone.above = above
        self.above = above
        return above

    @property
    def saved_tokens(self) -> int:
        """Tokens of prefill that only this checkpoint saves."""
        above = self.next_shallower
        return self.num_tokens - (above.num_tokens if above else 0)


@dataclass(frozen=True)
class Match:
    """Answer of a look-up; a plan only, until `claim` pins it.

    num_tokens: agreed hit, where latent pages and a checkpoint exist; a multiple of the unit.
    pages: the pages that hold those tokens, in order.
    checkpoint: the state after those tokens; None exactly when num_tokens is 0.
    num_latent_tokens: longest prefix with latent pages, no longer than the limit.
    copy_source: the last of `pages` when the hit ends inside it. Others may read that page, so
        a request that goes on writing copies it into a page of its own first.
    num_lookup_tokens: tokens asked for (the limit).
    keys: per page, the key of the last unit used of it.
    """

    num_tokens: int
    pages: tuple[int, ...]
    checkpoint: Checkpoint | None
    num_latent_tokens: int
    copy_source: int | None = None
    num_lookup_tokens: int = 0
    keys: tuple[bytes, ...] = ()

    @property
    def junction(self) -> int | None:
        """Where this second sighting of a prefix wants a checkpoint, None when a hit covers it.

        Tokens that an earlier request left in the latent pages but that no checkpoint makes
        usable: the siblings part here, so the state at this many tokens serves the next one.
        """
        return self.num_latent_tokens if self.num_latent_tokens > self.num_tokens else None


@dataclass(frozen=True)
class EvictedCheckpoint:
    """A checkpoint and the latent pages of its whole prefix, all still intact in the arena.

    keys: per page of `pages`, the key of the last unit used of it (names the bytes for a tier).
    """

    checkpoint: Checkpoint
    pages: tuple[int, ...]
    keys: tuple[bytes, ...]


@dataclass(frozen=True)
class EvictedPages:
    """Latent pages that no checkpoint makes usable. key: of the last unit of the last page."""

    key: bytes
    num_tokens: int
    pages: tuple[int, ...]


@dataclass
class CacheCounters:
    """Sums since the start (architecture 9). Look-ups are counted at `claim`, hence once."""

    lookup_tokens: int = 0
    latent_match_tokens: int = 0
    hit_tokens: int = 0
    uncached_common_prefix_tokens: int = 0
    checkpoint_hits: int = 0
    checkpoint_misses: int = 0
    checkpoints_taken: int = 0
    checkpoints_refused: int = 0
    checkpoints_recycled: int = 0
    checkpoints_evicted: int = 0
    pages_evicted: int = 0
