"""One log line a request: its id, route, status, sizes and time, and nothing that it says.

Prompts, answers, images and keys are in no log (serving 8). The route is the template, not the
address, which may hold anything.
"""

from __future__ import annotations

import logging
import time
import uuid

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from k3_serve.ops.auth import tenant_of

logger = logging.getLogger("k3_serve.access")


class AccessLog:
    """ASGI middleware: gives each request an id, in the header X-Request-Id, and logs its end."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = f"req_{uuid.uuid4().hex}"
        start, status, num_in, num_out = time.monotonic(), 0, 0, 0

        async def counted_in() -> Message:
            nonlocal num_in
            message = await receive()
            num_in += len(message.get("body", b""))
            return message

        async def counted_out(message: Message) -> None:
            nonlocal status, num_out
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            num_out += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, counted_in, counted_out)
        finally:
            logger.info(
                "%s %s %s %d in=%d out=%d seconds=%.3f tenant=%s",
                request_id,
                scope["method"] if scope["method"].isalpha() else "?",
                getattr(scope.get("route"), "path", "-"),
                status,
                num_in,
                num_out,
                time.monotonic() - start,
                tenant_of(scope) or "-",
            )
