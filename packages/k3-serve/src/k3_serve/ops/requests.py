"""ASGI middlewares that bound a request before the API sees it (serving 8)."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from k3_serve.api.errors import ApiError
from k3_serve.limits import Limits, is_nested_deeper
from k3_serve.ops.auth import tenant_of

logger = logging.getLogger("k3_serve")


class RequestLimit:
    """Bounds headers, body and the nesting of JSON; the application gets the body in one piece.

    431 for long headers, 413 for a long body (declared or not), 408 for one that does not arrive,
    400 for one that is nested too deeply or is not UTF-8.
    """

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            _check_headers(scope, self._limits)
            body = await self._read(receive)
            if body is None:
                return  # the client went away
            _check_json(body, self._limits)
        except ApiError as refused:
            await refused.response(scope, receive, send)
            return
        is_read = False

        async def replay() -> Message:
            nonlocal is_read
            if is_read:
                return await receive()
            is_read = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, replay, send)

    async def _read(self, receive: Receive) -> bytes | None:
        pieces: list[bytes] = []
        num_bytes, max_bytes = 0, self._limits.max_body_bytes
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    pieces.append(message.get("body", b""))
                    num_bytes += len(pieces[-1])
                    if num_bytes > max_bytes:
                        raise _too_long(max_bytes)
                    if not message.get("more_body", False):
                        return b"".join(pieces)
        except TimeoutError as error:
            seconds = self._limits.body_seconds
            raise ApiError(408, f"the body did not arrive within {seconds:g} s") from error


def _check_headers(scope: Scope, limits: Limits) -> None:
    num_bytes = sum(len(name) + len(value) for name, value in scope["headers"])
    num_bytes += len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"")
    if num_bytes > limits.max_header_bytes:
        raise ApiError(
            431, f"{num_bytes} bytes of address and headers; at most {limits.max_header_bytes}"
        )
    declared = dict(scope["headers"]).get(b"content-length", b"0")
    if not declared.isdigit() or int(declared[:20]) > limits.max_body_bytes:
        raise _too_long(limits.max_body_bytes)


def _too_long(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body is longer than {max_bytes} bytes; send a smaller request")


def _check_json(body: bytes, limits: Limits) -> None:
    # JSON in UTF-16 or UTF-32 has a zero among its first four bytes. The nesting could not be
    # counted there, and interchanged JSON is UTF-8 (RFC 8259, 8.1).
    if b"\0" in body[:4]:
        raise ApiError(400, "the body is not valid JSON: it must be UTF-8", code="json_invalid")
    if is_nested_deeper(body, limits.max_depth):
        raise ApiError(
            400, f"the body is nested too deeply; at most {limits.max_depth} levels", code="nesting"
        )


class Concurrency:
    """429 when a key has too many requests at the same time (serving 8).

    What answers at once (health, lists, metrics: everything but POST) is not counted.
    """

    def __init__(self, app: ASGIApp, max_requests: int) -> None:
        self._app = app
        self._max_requests = max_requests
        self._running: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        tenant = tenant_of(scope)
        if self._running[tenant] >= self._max_requests:
            message = (
                f"{self._max_requests} requests of this key are running; wait until one has ended"
            )
            wait = {"Retry-After": "1"}
            refused = ApiError(429, message, code="rate_limit_exceeded", headers=wait)
            await refused.response(scope, receive, send)
            return
        self._running[tenant] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._running[tenant] -= 1
            if not self._running[tenant]:
                del self._running[tenant]


class SlowReader:
    """Gives up on a client that reads nothing for too long: its request ends and is freed.

    A response waits for its reader without holding up others; this only bounds how long. Nearly
    all sends return at once, so a request has one timer that looks at them, not each send its own.
    """

    def __init__(self, app: ASGIApp, seconds: float) -> None:
        self._app = app
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        loop, bound = asyncio.get_running_loop(), asyncio.timeout(None)
        began: float | None = None  # when the send that goes on began
        timer: asyncio.TimerHandle

        async def noted(message: Message) -> None:
            nonlocal began
            began = loop.time()
            try:
                await send(message)
            finally:
                began = None

        def look() -> None:
            nonlocal timer
            now = loop.time()
            due = (now if began is None else began) + self._seconds
            if due <= now:
                bound.reschedule(now)
            else:
                timer = loop.call_at(due, look)

        look()
        try:
            async with bound:
                await self._app(scope, receive, noted)
        except TimeoutError:
            if not bound.expired():
                raise
            logger.warning("a client read nothing for %g s; its request ends", self._seconds)
        finally:
            timer.cancel()
