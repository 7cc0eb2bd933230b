"""What one step does, as plain data (architecture 9c).

The order of execution is the order of the fields: the copies, the forward, the saves. What a
plan names is pinned until `Scheduler.complete`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from k3_serve.engine.request import RequestState


@dataclass(frozen=True)
class Restore:
    """The slot becomes the checkpoint's state after `num_tokens`; without an extent, empty."""

    slot: int
    extent: tuple[int, ...] | None
    num_tokens: int


@dataclass(frozen=True)
class Slice:
    """Rows start:stop of a request, all before them being computed.

    `pages` hold at least `stop` rows; it is the request's live table. A decode is one row and,
    behind it, those that were drafted: the request has these only once they are accepted.
    """

    request: RequestState
    start: int
    stop: int
    slot: int
    pages: Sequence[int]
    wants_logits: bool
    """Whether the last row's logits give the next token."""
    draft: tuple[int, ...] = ()
    """Token ids of the last rows, which the step verifies."""

    @property
    def num_tokens(self) -> int:
        """Rows of the slice."""
        return self.stop - self.start

    def num_kept(self, drawn: Sequence[int]) -> int:
        """Rows that count when these tokens were drawn: all but the drafted ones that differ."""
        return self.num_tokens - len(self.draft) + max(len(drawn) - 1, 0)

    @property
    def ids(self) -> list[int]:
        """The token id of each row."""
        return [*self.request.rows[self.start : self.stop], *self.draft]


@dataclass(frozen=True)
class Save:
    """A checkpoint to take: the state after `num_tokens` rows of the request, into an extent."""

    request: RequestState
    num_tokens: int
    extent: tuple[int, ...]
    key: bytes
    kind: str


@dataclass(frozen=True)
class StepPlan:
    """One step."""

    restores: tuple[Restore, ...] = ()
    page_copies: tuple[tuple[int, int], ...] = ()
    """(source, destination): a request goes on in a copy of the page that a hit ends in."""
    decodes: tuple[Slice, ...] = ()
    prefills: tuple[Slice, ...] = ()
    saves: tuple[Save, ...] = ()
    admitted: tuple[RequestState, ...] = ()
    """Requests that got a slot in this step."""
    preempted: tuple[RequestState, ...] = field(default=())
    """Requests that lost their slot in this step and wait again."""

    @property
    def slices(self) -> tuple[Slice, ...]:
        """All rows of the forward, in its order."""
        return self.decodes + self.prefills

    @property
    def num_tokens(self) -> int:
        """Rows of the forward."""
        return sum(one.num_tokens for one in self.slices)
