"""The one place where an application is wrapped in its guards (serving 8)."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from k3_serve.api.errors import install as install_errors
from k3_serve.ops.auth import RequireKey
from k3_serve.ops.log import AccessLog
from k3_serve.ops.requests import Concurrency, RequestLimit, SlowReader
from k3_serve.ops.state import ReadyGate, ServerState
from k3_serve.settings import Settings


def install_guards(app: FastAPI, settings: Settings, state: ServerState) -> None:
    """Adds every middleware; a request passes them from the last line here to the first.

    So a request without a key costs a look at its headers, and one that is refused is logged.
    """
    limits = settings.limits
    app.add_middleware(RequestLimit, limits=limits)
    app.add_middleware(SlowReader, seconds=limits.send_seconds)
    app.add_middleware(Concurrency, max_requests=limits.max_key_requests)
    app.add_middleware(ReadyGate, state=state)
    app.add_middleware(RequireKey, keys=settings.keys)
    install_errors(app)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type"],
        )
    app.add_middleware(AccessLog)
