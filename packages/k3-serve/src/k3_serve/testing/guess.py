"""A draft whose guesses a test decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from k3_serve.engine.request import RequestState
from k3_serve.spec.base import Pass

if TYPE_CHECKING:
    from torch import Tensor


class GuessDraft:
    """Proposes `guess(rows, limit)`; satisfies `k3_serve.spec.Drafter`."""

    needs_hidden = False

    def __init__(self, guess: Callable[[list[int], int], list[int]]) -> None:
        self._guess = guess
        self.num_drafted = 0

    def propose(self, asked: Sequence[tuple[RequestState, int]]) -> list[list[int]]:
        """The guesses, and their number is counted."""
        drafts = [self._guess(request.rows, limit) for request, limit in asked]
        self.num_drafted += sum(map(len, drafts))
        return drafts

    def observe(self, passes: Sequence[Pass], mix_TD: Tensor) -> None:
        """Does nothing."""

    def forget(self, request: RequestState) -> None:
        """Does nothing."""

    def reset(self) -> None:
        """Does nothing."""
