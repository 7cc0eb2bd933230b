"""Errors in the OpenAI shape: `{"error": {message, type, param, code}}` (serving 4c).

FastAPI's own 422 body never leaves the server, and no error repeats request content beyond the
offending value.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger("k3_serve")


class ApiError(Exception):
    """An error for the client; `param` names the field of the request that is at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers
        self.body = error_body(status, message, param, code)

    @property
    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, headers=self.headers)


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that is wrong in itself."""
    return ApiError(400, message, param=param, code=code)


def error_body(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """The body of an error response, also sent as an event in the middle of a stream."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def unexpected(error: Exception) -> ApiError:
    """What the client is told of an exception that nothing foresaw; the log gets its place.

    Its message may hold request content: it goes to no client and to no log (serving 8).
    """
    where = "".join(traceback.format_tb(error.__traceback__))
    logger.error("request failed: %s\n%s", type(error).__name__, where)
    return ApiError(500, "internal error; the server's log has the details")


class Unexpected:
    """ASGI middleware: an exception that nothing foresaw ends its own request and goes no further.

    A handler of FastAPI's would still let it through to the HTTP server, which logs its message.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_started = False

        async def watched(message: Message) -> None:
            nonlocal is_started
            is_started = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as error:
            if scope["type"] != "http":
                raise
            response = unexpected(error).response
            if not is_started:
                await response(scope, receive, send)


def install(app: FastAPI) -> None:
    """Gives every error of the application the OpenAI shape."""
    app.add_middleware(Unexpected)

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> JSONResponse:
        return error.response

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return invalid_body(error.errors()).response

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> JSONResponse:
        body = error_body(error.status_code, str(error.detail))
        return JSONResponse(body, error.status_code, headers=error.headers)

    @app.exception_handler(RecursionError)
    async def too_deep(_: Request, error: RecursionError) -> JSONResponse:
        return bad_request("the body is nested too deeply", code="nesting").response


def invalid_body(errors: Sequence[Any]) -> ApiError:
    """The error for a body that is no JSON or does not have the shape of its request."""
    found = _telling(errors)
    if found["type"] == "json_invalid":
        problem = f"{found['ctx']['error']} at character {found['loc'][-1]}"
        return bad_request(f"the body is not valid JSON: {problem}", code="json_invalid")
    param = _path(found["loc"])
    return bad_request(f"{param or 'body'}: {found['msg']}", param, found["type"])


def _telling(errors: Sequence[Any]) -> Any:
    """The first error; of a field of several types, where each fails, the one that has its type."""
    alike = [error for error in errors if error["loc"][:2] == errors[0]["loc"][:2]]
    return next((error for error in alike if not error["type"].endswith("_type")), alike[0])


def _path(loc: tuple[int | str, ...]) -> str | None:
    """("body", "messages", 2, "role") -> "messages[2].role"; the arms of a union are left out."""
    path = ""
    for step in loc:
        if isinstance(step, int):
            path += f"[{step}]"
        elif step.isidentifier() and step not in ("body", "str", "dict", "int", "none"):
            path += f".{step}"
    return path.lstrip(".") or None
