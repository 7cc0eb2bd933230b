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

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """The events of all choices as they come; ApiError 500 when a choice failed."""
        try:
            if len(self.handles) == 1:  # as most have it: nothing between on a token's way
                async for event in self.handles[0]:
                    self._see(0, event)
                    yield 0, event
                return
            async with aclosing(_merged(self.handles)) as merged:
                async for index, event in merged:
                    self._see(index, event)
                    yield index, event
        finally:
            self.abort()

    def _see(self, index: int, event: Event) -> None:
        self._timers[index].see(event)
        if (reason := event.finish_reason) in ("error", "abort", "suspended"):
            raise ApiError(500, f"generation failed: {event.error or reason}", code=reason)


async def _merged(handles: Sequence[Handle]) -> AsyncGenerator[tuple[int, Event], None]:
    """The events of all handles as they come, each with the number of its handle."""
    events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()

    async def pump(index: int, handle: Handle) -> None:
        async for event in handle:
            events.put_nowait((index, event))

    tasks = [asyncio.create_task(pump(i, h)) for i, h in enumerate(handles)]
    try:
        num_open = len(tasks)
        while num_open:
            index, event = await events.get()
            num_open -= event.finish_reason is not None
            yield index, event
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
