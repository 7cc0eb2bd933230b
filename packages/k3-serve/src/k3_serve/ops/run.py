"""Runs the applications on their sockets until a signal, then drains (serving 8 and 9d)."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import socket
import ssl
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from k3_core.errors import K3Error
from k3_serve.ops.state import ServerState
from k3_serve.settings import Settings


@dataclass(frozen=True)
class Tls:
    """Files of a certificate chain and its private key, in PEM."""

    certificate: Path
    key: Path

    @classmethod
    def read(cls, certificate: Path | None, key: Path | None) -> Tls | None:
        """None without both; K3Error when one is missing or they do not fit together."""
        if certificate is None and key is None:
            return None
        if certificate is None or key is None:
            raise K3Error("TLS needs both --tls-cert and --tls-key")
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key)
        except OSError as error:  # an SSLError is one
            raise K3Error(f"cannot use {certificate} with {key}: {error}") from error
        return cls(certificate, key)


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address, not yet listening; K3Error when it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise K3Error(
            f"cannot listen on {host}:{port}: {error.strerror or error}; choose another --port"
        ) from error
    return listener


def bind_unix(path: Path) -> socket.socket:
    """A Unix socket that only this user can open; one that nobody listens on is replaced."""
    if path.is_socket() and not _has_listener(path):
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)  # it is never open to others, not even for a moment
    try:
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise K3Error(f"cannot listen on {path}: {error.strerror or error}") from error
    finally:
        os.umask(before)
    return listener


def _has_listener(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        return peer.connect_ex(str(path)) == 0


class DrainingServer(uvicorn.Server):
    """Marks the state when a signal asks for the end; then takes no request and waits for those."""

    def __init__(self, config: uvicorn.Config, state: ServerState) -> None:
        super().__init__(config)
        self._state = state

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._state.is_draining = True
        super().handle_exit(sig, frame)


class CompanionServer(uvicorn.Server):
    """Leaves the signals to the main server."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def server_config(app: FastAPI, settings: Settings, tls: Tls | None = None) -> uvicorn.Config:
    """How uvicorn serves an application: quiet, no proxy headers, bounded headers, a drain."""
    return uvicorn.Config(
        app,
        http="h11",  # the one whose bound on headers is set below
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=2 * settings.limits.max_header_bytes,
        timeout_graceful_shutdown=math.ceil(settings.drain_seconds),
        ssl_certfile=None if tls is None else tls.certificate,
        ssl_keyfile=None if tls is None else tls.key,
    )


def run(
    app: FastAPI,
    listener: socket.socket,
    settings: Settings,
    *,
    tls: Tls | None = None,
    admin: tuple[FastAPI, socket.socket] | None = None,
) -> None:
    """Serves until SIGINT or SIGTERM; after SIGTERM and the drain it exits with code 0."""
    # uvicorn raises the signal again, after the drain, for the handler that was there before.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    main = DrainingServer(server_config(app, settings, tls), app.state.server)

    async def both() -> None:
        others: list[tuple[CompanionServer, asyncio.Task[Any]]] = []
        if admin is not None:
            companion = CompanionServer(server_config(admin[0], settings))
            task = asyncio.create_task(companion.serve(sockets=[admin[1]]))
            others.append((companion, task))
        try:
            await main.serve(sockets=[listener])
        finally:
            for companion, task in others:
                companion.should_exit = True
                await task

    # uvloop where there is one: its writes do not give the interpreter lock to the engine's thread.
    with asyncio.Runner(loop_factory=main.config.get_loop_factory()) as runner:
        runner.run(both())
