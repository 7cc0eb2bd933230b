"""One request over HTTP/1.1 on a connection of its own, whose bytes are only kept with their times.

An HTTP client that takes an answer apart while it comes costs several times what this does, of
cores that the server may share. The answer ends with the connection; `opened` reads it afterwards.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import h11
import httpx

Pieces = list[tuple[float, bytes]]
"""Bytes, each with the time at which they came."""


class Wire(asyncio.Protocol):
    """Keeps what comes; `closed` is done when nothing more will, with an error if there was one."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.received: Pieces = []
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.received.append((self._now(), data))

    def connection_lost(self, exc: Exception | None) -> None:
        if self.closed.done():  # whoever waited has given up
            return
        if exc is None:
            self.closed.set_result(None)
        else:
            self.closed.set_exception(exc)


async def post(
    url: httpx.URL,
    headers: Mapping[str, str],
    body: Any,
    *,
    now: Callable[[], float],
    silence: float,
) -> Pieces:
    """Sends a body as JSON; all that came back, until the other side closed the connection.

    OSError when it breaks, TimeoutError (which is one) when nothing comes for `silence` seconds.
    """
    is_safe = url.scheme == "https"
    loop = asyncio.get_running_loop()
    transport, wire = await loop.create_connection(
        lambda: Wire(now), url.host, url.port or (443 if is_safe else 80), ssl=is_safe or None
    )
    try:
        transport.write(_request(url, headers, json.dumps(body).encode()))
        seen = -1
        while not wire.closed.done():
            if len(wire.received) == seen:
                raise TimeoutError(f"nothing came for {silence:g} s")
            seen = len(wire.received)
            await asyncio.wait([wire.closed], timeout=silence)
        await wire.closed
    finally:
        transport.abort()
    return wire.received


def _request(url: httpx.URL, headers: Mapping[str, str], content: bytes) -> bytes:
    fields = {
        "Host": url.netloc.decode(),
        "Accept-Encoding": "identity",
        "Content-Type": "application/json",
        "Content-Length": str(len(content)),
        "Connection": "close",
        **headers,
    }
    target = url.raw_path.decode()
    connection = h11.Connection(h11.CLIENT)
    head = connection.send(h11.Request(method="POST", target=target, headers=list(fields.items())))
    return (head or b"") + content


def opened(received: Iterable[tuple[float, bytes]]) -> tuple[int, Pieces]:
    """Status and body of what came back; ValueError when it is no whole answer.

    A piece of the body has the time at which its last byte came.
    """
    connection = h11.Connection(h11.CLIENT)
    connection.send(h11.Request(method="GET", target="/", headers=[("Host", "k3")]))
    connection.send(h11.EndOfMessage())
    status, pieces = 0, []
    try:
        for at, data in (*received, (0.0, b"")):
            connection.receive_data(data)
            while (event := connection.next_event()) is not h11.NEED_DATA:
                if isinstance(event, h11.Response):
                    status = event.status_code
                elif isinstance(event, h11.Data):
                    pieces.append((at, bytes(event.data)))
                elif isinstance(event, h11.EndOfMessage):
                    return status, pieces
    except h11.RemoteProtocolError as error:
        raise ValueError(f"no whole answer came: {error}") from error
    raise ValueError("no answer came")
