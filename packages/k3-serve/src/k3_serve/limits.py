"""What one request may cost, checked before the work (serving 8)."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from k3_serve.api.errors import error_body


@dataclass(frozen=True)
class Limits:
    """Bounds of one request. Sizes in bytes and pixels, the rest are counts."""

    max_body_bytes: int = 32 * 2**20
    max_messages: int = 10_000
    max_tools: int = 1024
    max_images: int = 32
    max_image_pixels: int = 64 * 2**20
    max_prompts: int = 1024


class BodyLimit:
    """ASGI middleware: a body longer than the limit is refused with 413, declared or not."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._message = f"the body is longer than {max_bytes} bytes; send a smaller request"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if not declared.isdigit() or int(declared) > self._max_bytes:
            await JSONResponse(error_body(413, self._message), 413)(scope, receive, send)
            return
        num_bytes = 0

        async def limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise HTTPException(413, self._message)
            return message

        await self._app(scope, limited, send)
