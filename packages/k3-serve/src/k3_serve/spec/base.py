"""What the engine asks of a draft. T rows of the engine's forward, D model width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from k3_serve.engine.request import RequestState

if TYPE_CHECKING:
    from torch import Tensor


class Pass(NamedTuple):
    """Rows start:stop of a request were computed as rows `offset` and on of the last forward.

    The row behind them, `request.rows[stop]`, is known.
    """

    request: RequestState
    start: int
    stop: int
    offset: int


class Drafter(Protocol):
    """Guesses what follows the rows of decoding requests; the engine's thread calls it.

    A guess never changes an answer, so a draft may drop what it keeps whenever it likes.
    """

    needs_hidden: bool
    """Whether `observe` is to be called, with the model's output mix."""

    def propose(self, asked: Sequence[tuple[RequestState, int]]) -> list[list[int]]:
        """For each (request, limit) up to `limit` token ids to follow `request.rows`."""
        ...

    def observe(self, passes: Sequence[Pass], mix_TD: Tensor) -> None:
        """Takes what a forward computed of requests that go on; steps may be left out."""
        ...

    def forget(self, request: RequestState) -> None:
        """The request has ended."""
        ...

    def reset(self) -> None:
        """Other weights, or a pause: everything kept is void, and its memory is free again."""
        ...
