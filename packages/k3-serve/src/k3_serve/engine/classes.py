"""Request classes: who gets how much of a step, of the slots and of the queue (report 5.4).

The cost of a request spans three orders of magnitude, so a burst of long ones must only use the
share of its class; averages over all requests and fixed quotas fail.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from k3_core.engine.protocol import EngineBusy
from k3_serve.engine.plan import Slice


@dataclass(frozen=True)
class RequestClass:
    """Requests of up to `max_rows` prompt tokens.

    `weight` is the share of a step's prefill tokens while several classes want them. `slot_share`
    is the part of the slots that its requests may hold at once (at least one slot). More than
    `queue_tokens` of prompt and expected output are not queued.
    """

    name: str
    max_rows: int
    weight: int
    slot_share: float
    queue_tokens: int


CLASSES = (
    RequestClass("short", 2_048, 4, 1.0, 1 << 20),
    RequestClass("medium", 32_768, 2, 0.75, 1 << 21),
    RequestClass("long", 262_144, 1, 0.5, 1 << 22),
    RequestClass("ultra", 1 << 62, 1, 0.25, 1 << 23),
)

DEPTH_OF_DOUBLE = {"cpu": 2_048, "cuda": 262_144}
"""By kind of device, the rows of past at which a row of a chunk of prompt takes about twice the
time of the first: measured with k3-nano and with k3-mini (docs/performance.md)."""

BESIDE = 0.25
"""Of the time by its weight, what a class gets while requests of shorter classes run: a queue of
those grows long before the machine is full. What they leave is its own anyway."""

LATELY = 16
"""Budgets of work for which a shorter class that has left is expected to come back."""


def classify(
    num_rows: int, asked: str = "default", classes: tuple[RequestClass, ...] = CLASSES
) -> RequestClass:
    """The class of that name, else the first that the prompt's length fits."""
    for one in classes:
        if one.name == asked:
            return one
    return next(one for one in classes if num_rows <= one.max_rows)


class Shares:
    """Rows of prompt that a class may have in a step beside requests of shorter classes.

    The length of a step is what those wait for, even for a decode. So time is shared, not rows: a
    step earns each longer class a part by its weight of what the shorter ones had of it, the fixed
    cost of a step included. The class spends that in steps without a prompt of a shorter one,
    unless it has not been served for long. It has the pauses of the shorter ones to itself, but
    while those come back soon, in chunks that take no longer than a budget of short rows.
    """

    def __init__(self, weights: Mapping[str, int], budget: int, unit: int, device: str) -> None:
        """`weights` goes from the shortest class to the longest."""
        self._weights, self._budget, self._unit = weights, budget, unit
        self._depth = DEPTH_OF_DOUBLE[device]
        self._fixed = budget / 16  # about what a step without a prompt takes, in rows
        self._limit = 3.0 * budget
        self._earned = dict.fromkeys(weights, self._limit)
        self._since = dict.fromkeys(weights, math.inf)

    def rooms(self, present: Collection[str], starts: Mapping[str, int]) -> dict[str, int]:
        """Most rows of each class in a step: `present` run or wait, `starts` have a prompt to
        compute, the next one from that row on."""
        total = sum(self._weights[name] for name in present)
        rooms, is_first, has_prompt, is_soon = {}, True, False, False
        for name, weight in self._weights.items():
            most = self._budget if is_first else max(self._budget * weight // max(total, 1), 1)
            if is_soon and name in starts:
                brief = int(self._budget / self._cost(starts[name]))
                most = max(min(most, brief), self._unit)
            if not is_first and name in starts:
                most = self._affordable(name, most, starts[name], has_prompt)
            rooms[name] = most
            is_first = is_first and name not in present
            has_prompt = has_prompt or name in starts
            is_recent = self._since[name] < LATELY * self._budget
            is_soon = is_soon or is_recent or not is_first
        return rooms

    def _affordable(self, name: str, most: int, start: int, is_behind: bool) -> int:
        earned = self._earned[name]
        if earned >= self._limit:
            return most
        return 0 if is_behind or earned < self._unit * self._cost(start) else most

    def _cost(self, start: int) -> float:
        """A row of prompt behind so many others, in rows of a short one: it reads its past."""
        return 1 + start / self._depth

    def settle(self, slices: Iterable[Slice], present: Collection[str]) -> None:
        """After the planning of a step: all that is in it, decodes too."""
        spent = dict.fromkeys(self._weights, 0.0)
        for one in slices:
            spent[one.request.request_class] += one.num_tokens * self._cost(one.start)
        work = self._fixed + sum(spent.values())
        for name, since in self._since.items():
            self._since[name] = 0 if name in present else since + work
        shorter_weight, shorter_work = 0, self._fixed
        for name, weight in self._weights.items():
            if name not in present:
                continue
            if shorter_weight:
                due = BESIDE * shorter_work * weight / shorter_weight
                balance = self._earned[name] + due - spent[name]
                self._earned[name] = min(balance, self._limit)
            shorter_weight += weight
            shorter_work += spent[name]


class DeficitRoundRobin:
    """Shares a step's tokens among classes in proportion to their weights.

    A class that could not use its grant (too little for a unit, no slot, no pages) keeps it for
    the next step, up to `limit` tokens, and is served before the others then.
    """

    def __init__(self, weights: Mapping[str, int], quantum: int, limit: int) -> None:
        self._quanta = {name: weight * quantum for name, weight in weights.items()}
        self._limit = limit
        self._deficits = dict.fromkeys(weights, 0)
        self._last_served = dict.fromkeys(weights, 0)
        self._clock = 0

    def order(self, names: Iterable[str]) -> list[str]:
        """The classes by what they are owed, the longest unserved first among equals."""
        return sorted(names, key=lambda n: (-self._deficits[n], self._last_served[n]))

    def grant(self, name: str) -> int:
        """Adds a quantum; tokens that the class may use now."""
        self._deficits[name] = min(self._deficits[name] + self._quanta[name], self._limit)
        return self._deficits[name]

    def spend(self, name: str, num_tokens: int) -> None:
        """Charges what was used."""
        self._deficits[name] -= num_tokens
        if num_tokens:
            self._clock += 1
            self._last_served[name] = self._clock

    def clear(self, name: str) -> None:
        """A class without work has no claims."""
        self._deficits[name] = 0


class Admission:
    """The queue budgets of the classes, in tokens; used from any thread."""

    def __init__(self, classes: tuple[RequestClass, ...] = CLASSES) -> None:
        self._limits = {one.name: one.queue_tokens for one in classes}
        self._queued = dict.fromkeys(self._limits, 0)
        self._lock = threading.Lock()
        self.tokens_per_second = 0.0
        """Measured by the engine, for the estimate of when to try again."""

    def enter(self, name: str, cost: int) -> None:
        """Books a request's tokens; EngineBusy when the class has no room.

        An empty queue takes a request of any size.
        """
        with self._lock:
            queued, limit = self._queued[name], self._limits[name]
            if queued and queued + cost > limit:
                wait = queued / self.tokens_per_second if self.tokens_per_second else 1.0
                raise EngineBusy(
                    f"the queue of {name} requests holds {queued} of {limit} tokens and this one "
                    f"needs {cost}; try again later",
                    name,
                    min(max(wait, 1.0), 60.0),
                )
            self._queued[name] = queued + cost

    def leave(self, name: str, cost: int) -> None:
        """Takes a request out that runs now or has ended."""
        with self._lock:
            self._queued[name] -= cost
