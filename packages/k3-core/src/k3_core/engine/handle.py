"""The event stream between an engine's thread and a consumer (report 5.4)."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Iterable

from k3_core.engine.protocol import Completion, Event, TokenLogprob


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
        self._ready = threading.Condition()
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None
        self._is_exhausted = False

    def put(self, event: Event) -> None:
        """Adds an event and wakes the consumer; called by the engine only."""
        with self._ready:
            self._events.append(event)
            self._ready.notify()
            waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter[0].is_closed():
            loop, future = waiter
            loop.call_soon_threadsafe(_resolve, future)

    def _pop(self) -> Event:
        event = self._events.popleft()
        self._is_exhausted = event.finish_reason is not None
        return event

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> Event:
        while True:
            with self._ready:
                if self._events:
                    return self._pop()
                if self._is_exhausted:
                    raise StopAsyncIteration
                loop = asyncio.get_running_loop()
                future = loop.create_future()
                self._waiter = (loop, future)
            await future

    def __iter__(self) -> EventStream:
        return self

    def __next__(self) -> Event:
        with self._ready:
            if self._is_exhausted:
                raise StopIteration
            self._ready.wait_for(lambda: bool(self._events))
            return self._pop()


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():  # a cancelled consumer has given up waiting
        future.set_result(None)


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
