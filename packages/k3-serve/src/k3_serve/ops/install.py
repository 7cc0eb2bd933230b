"""The one place where an application is wrapped in its guards (serving 8)."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from k3_serve.ops.auth import RequireKey
from k3_serve.ops.requests import Concurrency, RequestLimit, SlowReader
from k3_serve.settings import Settings


def install_guards(app: FastAPI, settings: Settings) -> None:
    """Adds the middlewares: origins, then keys, then concurrency, then the limits of a request.

    Call it after the routes' own error handling is installed; what is added last is outermost.
    """
    limits = settings.limits
    app.add_middleware(RequestLimit, limits=limits)
    app.add_middleware(SlowReader, seconds=limits.send_seconds)
    app.add_middleware(Concurrency, max_requests=limits.max_key_requests)
    app.add_middleware(RequireKey, keys=settings.keys)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type"],
        )
