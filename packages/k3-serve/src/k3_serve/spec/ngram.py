"""Prompt lookup: what followed the last tokens where they stood before; no model.

It pays where an answer repeats its prompt or itself: edits of code, extraction, tool results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from k3_serve.engine.request import RequestState
from k3_serve.spec.base import Pass

if TYPE_CHECKING:
    from torch import Tensor

MAX_ROWS = 1 << 16
"""Rows of a prompt that are looked into, the last ones: the index has about 150 bytes a row."""
MAX_PLACES = 8
"""Latest places of the shortest match that are compared for a longer one."""


class _Places:
    """Where each run of `width` tokens of one request ended, the latest first."""

    def __init__(self, width: int, start: int) -> None:
        self._width, self._start = width, start
        self._last: dict[tuple[int, ...], int] = {}
        self._before: list[int] = []
        """For each row from `start` on, the row where the same run ended before; -1 for none."""

    def extend(self, rows: list[int]) -> None:
        """Enters the rows that something follows: all but the last."""
        for end in range(self._start + len(self._before), len(rows) - 1):
            run = tuple(rows[end + 1 - self._width : end + 1])
            self._before.append(self._last.get(run, -1))
            self._last[run] = end

    def latest(self, rows: list[int]) -> list[int]:
        """Up to `MAX_PLACES` earlier ends of the run at the end of the rows."""
        places: list[int] = []
        place = self._last.get(tuple(rows[-self._width :]), -1)
        while place >= 0 and len(places) < MAX_PLACES:
            places.append(place)
            place = self._before[place - self._start]
        return places


class NgramDraft:
    """Looks for the last `min_match` to `max_match` tokens of a request in its own rows.

    The longest match wins, the latest of equals. A step costs the rows that are new in it.
    """

    needs_hidden = False

    def __init__(self, min_match: int = 3, max_match: int = 8) -> None:
        if not 1 <= min_match <= max_match:
            raise ValueError(f"matches of {min_match} to {max_match} tokens; 1 <= min <= max")
        self._min, self._max = min_match, max_match
        self._places: dict[RequestState, _Places] = {}

    def propose(self, asked: Sequence[tuple[RequestState, int]]) -> list[list[int]]:
        """What followed the best match; a match that reaches the end is taken for a period."""
        return [self._propose(request, limit) for request, limit in asked]

    def _propose(self, request: RequestState, limit: int) -> list[int]:
        rows = request.rows
        places = self._places.get(request)
        if places is None:
            start = max(len(rows) - MAX_ROWS, self._min - 1)
            places = self._places[request] = _Places(self._min, start)
        places.extend(rows)
        found = places.latest(rows)
        if not found:
            return []
        first = max(found, key=lambda end: self._matched(rows, end)) + 1
        period = len(rows) - first
        return [rows[first + i % period] for i in range(limit)]

    def _matched(self, rows: list[int], end: int) -> int:
        """Tokens up to row `end` that equal the last ones."""
        count, most = 0, min(self._max, end + 1)
        while count < most and rows[end - count] == rows[-1 - count]:
            count += 1
        return count

    def observe(self, passes: Sequence[Pass], mix_TD: Tensor) -> None:
        """Does nothing: the rows say it all."""

    def forget(self, request: RequestState) -> None:
        self._places.pop(request, None)

    def reset(self) -> None:
        """Frees the indexes; they are built again from the rows."""
        self._places.clear()
