"""What a cached checkpoint is worth, and the queue that finds the cheapest one (architecture 6).

The value of a checkpoint is the prefill that it saves, per page that it occupies:

    value = tokens beyond the next shallower checkpoint / pages of the extent * recency
    recency = 2 ** (-age / half-life)

A long session's last checkpoint is worth far more than one of a short prompt, which plain LRU
cannot see. Age counts pages allocated since the last use, so it stands still on an idle server
and needs no clock; the half-life is one turnover of the pool by default. An exponential recency
lets the order of two checkpoints not change while both age, so a heap of log2(value), taken at
age zero of the pool, stays sorted without touching it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable
from itertools import count
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


def log_value(saved_tokens: int, num_pages: int, last_use: int, half_life: float) -> float:
    """log2 of the value above, up to a summand that all checkpoints share.

    saved_tokens: tokens beyond the next shallower checkpoint of the chain, at least 1.
    last_use, half_life: in allocated pages.
    """
    return math.log2(saved_tokens / num_pages) + last_use / half_life


class EvictionQueue(Generic[T]):
    """Items by ascending priority, with lazy deletion and lazy increase; O(log n) amortised.

    A priority that rises is noticed when the item comes up (`pop` asks for the current one); a
    priority that falls must be pushed again.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, T]] = []
        self._queued: dict[T, float] = {}
        self._order = count()

    def __len__(self) -> int:
        return len(self._queued)

    def push(self, item: T, priority: float) -> None:
        """Queue `item`, or lower its priority."""
        queued = self._queued.get(item)
        if queued is not None and queued <= priority:
            return
        self._queued[item] = priority
        heapq.heappush(self._heap, (priority, next(self._order), item))
        self._compact()

    def discard(self, item: T) -> None:
        """Drop `item` if it is queued."""
        self._queued.pop(item, None)
        self._compact()

    def pop(self, current: Callable[[T], float | None]) -> T | None:
        """Remove and return the item of the lowest current priority, None when all are gone.

        current: priority of an item now; None when it cannot be evicted, which drops it from
        the queue until it is pushed again.
        """
        while self._heap:
            queued, _, item = heapq.heappop(self._heap)
            if self._queued.get(item) != queued:
                continue
            del self._queued[item]
            priority = current(item)
            if priority is None:
                continue
            if priority <= queued:
                return item
            self.push(item, priority)
        return None

    def _compact(self) -> None:
        """Rebuild the heap when most of its entries are dead."""
        if len(self._heap) <= 2 * len(self._queued) + 64:
            return
        self._heap = [entry for entry in self._heap if self._queued.get(entry[2]) == entry[0]]
        heapq.heapify(self._heap)
