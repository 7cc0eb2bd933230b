"""The event stream between an engine's thread and a consumer (report 5.4)."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from k3_core.engine.protocol import Completion, Event, TokenLogprob

HOLD = 0.002
"""Seconds, for each of the consumers that wait together, from one waking of them to the next.

Where a consumer sends what it gets, as one event of a stream, it takes the interpreter lock for
about 0.1 ms, which the engine's thread waits for. So all of them have a twentieth of it, and with
many a waking gives several tokens each.
"""
LONGEST_HOLD = 0.05
"""Seconds that an event is held at most: twenty pieces of a text a second still flow."""


class _Bell:
    """Wakes the consumers that wait in one event loop.

    A step of an engine has an event for each of its requests. The first one wakes the loop, and
    until the loop comes to it the others only join: waking it costs a system call. Where several
    consumers were woken, the events of the following `HOLD` wait for its end, unless one of them is
    the first or the last of its request.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_called = False
        self._hold: asyncio.TimerHandle | None = None

    def ring(self, future: asyncio.Future[None], is_urgent: bool) -> None:
        """Has the loop of the future resolve it, if urgent at once; from any thread."""
        self._waiting.append(future)
        held: dict[_Bell, tuple[asyncio.AbstractEventLoop, bool]] | None
        held = getattr(_thread, "held", None)
        if held is None:
            self.wake(future.get_loop(), is_urgent)
        else:
            _, others = held.get(self, (None, False))
            held[self] = future.get_loop(), is_urgent or others

    def wake(self, loop: asyncio.AbstractEventLoop, is_urgent: bool) -> None:
        """Has the loop resolve all that wait."""
        is_due = is_urgent or self._hold is None
        if is_due and not self._is_called and not loop.is_closed():
            self._is_called = True
            loop.call_soon_threadsafe(self._answer)

    def _answer(self) -> None:
        self._is_called = False  # first: who joins from here on rings again
        if self._hold is not None:
            self._hold.cancel()
            self._hold = None
        num_woken = 0
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():  # it is when it rang twice, or its consumer gave up waiting
                future.set_result(None)
                num_woken += 1
        if num_woken > 1:
            seconds = min(num_woken * HOLD, LONGEST_HOLD)
            self._hold = asyncio.get_running_loop().call_later(seconds, self._answer)


_thread = threading.local()


@contextmanager
def waking_at_end() -> Iterator[None]:
    """Wakes what the events of this thread would wake at the end, all of it at once.

    Woken by the first event of a step, an event loop takes the interpreter lock before the others
    are there, and has to be woken again for each.
    """
    held: dict[_Bell, tuple[asyncio.AbstractEventLoop, bool]] = {}
    _thread.held = held
    try:
        yield
    finally:
        _thread.held = None
        for bell, (loop, is_urgent) in held.items():
            bell.wake(loop, is_urgent)


_BELLS: WeakKeyDictionary[asyncio.AbstractEventLoop, _Bell] = WeakKeyDictionary()


def _bell_of(loop: asyncio.AbstractEventLoop) -> _Bell:
    bell = _BELLS.get(loop)
    if bell is None:
        bell = _BELLS[loop] = _Bell()
    return bell


class EventStream:
    """A `Handle`: the engine puts events from its thread, one consumer takes them.

    The queue is unbounded, so a slow reader never holds up the other requests of a batch.
    """

    def __init__(self, request_id: str, num_prompt_tokens: int) -> None:
        self.request_id = request_id
        self.num_prompt_tokens = num_prompt_tokens
        self.num_cached_tokens = 0
        self.cache_report: dict[str, float | str] = {}
        """What a prefix cache did for the request, for those who look at it; empty without one."""
        self.prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
        self._events: deque[Event] = deque()
        self._lock = threading.Lock()
        self._ready = threading.Condition(self._lock)
        self._waiter: tuple[_Bell, asyncio.Future[None]] | None = None
        self._is_exhausted = self._is_begun = False

    def put(self, event: Event) -> None:
        """Adds an event and wakes the consumer; called by the engine only."""
        with self._lock:
            self._events.append(event)
            self._ready.notify()
            waiter = self._waiter
        is_urgent = not self._is_begun or event.finish_reason is not None
        self._is_begun = True
        if waiter is not None:
            bell, future = waiter
            bell.ring(future, is_urgent)

    def _pop(self) -> Event:
        event = self._events.popleft()
        self._is_exhausted = event.finish_reason is not None
        return event

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> Event:
        await self._arrival()
        if self._is_exhausted:
            raise StopAsyncIteration
        return self._pop()

    async def take(self) -> list[Event]:
        await self._arrival()
        return [self._pop() for _ in range(len(self._events))]

    async def _arrival(self) -> None:
        """Waits until there is an event, or none will follow."""
        while not (self._events or self._is_exhausted):
            with self._lock:  # the condition's own; it is entered in C
                if self._events:
                    return
                loop = asyncio.get_running_loop()
                future = loop.create_future()
                self._waiter = (_bell_of(loop), future)
            await future
            self._waiter = None

    def __iter__(self) -> EventStream:
        return self

    def __next__(self) -> Event:
        with self._lock:
            if self._is_exhausted:
                raise StopIteration
            self._ready.wait_for(lambda: bool(self._events))
            return self._pop()


def fold_events(
    events: Iterable[Event], prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
) -> Completion:
    """The completion that a request's events amount to; ValueError when they have no end."""
    tokens: list[Event] = []
    for event in events:
        if event.token_id is not None:
            tokens.append(event)
        if event.finish_reason is not None:
            return Completion(
                token_ids=tuple(e.token_id for e in tokens if e.token_id is not None),
                logprobs=tuple(e.logprob for e in tokens if e.logprob is not None),
                top_logprobs=tuple(e.top_logprobs for e in tokens),
                versions=tuple(e.version for e in tokens),
                finish_reason=event.finish_reason,
                error=event.error,
                prompt_logprobs=prompt_logprobs,
            )
    raise ValueError(f"{len(tokens)} events without a finish reason; read the handle to its end")
