"""The engine requests behind one HTTP request: submitted together, merged, aborted together."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager

from fastapi import Request as HttpRequest

from k3_core.engine import Engine, EngineBusy, Event, Handle, Request
from k3_serve.api.errors import ApiError, bad_request
from k3_serve.observer import Observer, Silent
from k3_serve.ops.timing import RequestTimer


class Run:
    """Handles of the choices of one HTTP request, numbered from 0."""

    def __init__(
        self,
        engine: Engine,
        requests: list[Request],
        param: str,
        observer: Observer | None = None,
    ) -> None:
        """Submits all or none.

        Raises ApiError 400 naming `param` when the engine refuses one, 429 when it is busy.
        """
        self._engine = engine
        self._observer = observer or Silent()
        self.handles: list[Handle] = []
        self._timers: list[RequestTimer] = []
        try:
            for request in requests:
                handle = engine.submit(request)
                self.handles.append(handle)
                self._timers.append(RequestTimer(self._observer, request, handle))
        except ValueError as error:
            self.abort()
            raise bad_request(str(error), param) from error
        except EngineBusy as error:
            self.abort()
            wait = str(max(1, math.ceil(error.retry_after)))
            raise ApiError(
                429, str(error), code="engine_busy", headers={"Retry-After": wait}
            ) from error

    def abort(self) -> None:
        """Ends whatever still runs; without effect on what has ended."""
        for handle in self.handles:
            self._engine.abort(handle)
        for timer in self._timers:
            timer.end()

    def count_reasoning(self, num_tokens: int) -> None:
        """Reports how many of the generated tokens were reasoning."""
        self._timers[0].count_reasoning(num_tokens)

    async def events(self) -> AsyncIterator[tuple[int, list[Event]]]:
        """What came of a choice since, choice by choice; ApiError 500 when one failed."""
        try:
            if len(self.handles) == 1:  # as most have it: nothing between on a token's way
                while events := await self.handles[0].take():
                    if sound := self._see(0, events):
                        yield 0, sound
                    _check(events[-1])
                return
            async with aclosing(_merged(self.handles)) as merged:
                async for index, events in merged:
                    if sound := self._see(index, events):
                        yield index, sound
                    _check(events[-1])
        finally:
            self.abort()

    def _see(self, index: int, events: list[Event]) -> list[Event]:
        """The events without one that says that the choice failed."""
        for event in events:
            self._timers[index].see(event)
        return events[:-1] if events[-1].finish_reason in FAILURES else events


FAILURES = ("error", "abort", "suspended")


def _check(event: Event) -> None:
    if (reason := event.finish_reason) in FAILURES:
        raise ApiError(500, f"generation failed: {event.error or reason}", code=reason)


async def _merged(handles: Sequence[Handle]) -> AsyncGenerator[tuple[int, list[Event]], None]:
    """What comes of all handles as it comes, each with the number of its handle."""
    queue: asyncio.Queue[tuple[int, list[Event]]] = asyncio.Queue()

    async def pump(index: int, handle: Handle) -> None:
        while events := await handle.take():
            queue.put_nowait((index, events))

    tasks = [asyncio.create_task(pump(i, h)) for i, h in enumerate(handles)]
    try:
        num_open = len(tasks)
        while num_open:
            index, events = await queue.get()
            num_open -= events[-1].finish_reason is not None
            yield index, events
    finally:
        for task in tasks:
            task.cancel()


@asynccontextmanager
async def on_disconnect(request: HttpRequest, action: Callable[[], None]) -> AsyncIterator[None]:
    """Runs the action when the client goes away during the block, even while it waits."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        action()

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
