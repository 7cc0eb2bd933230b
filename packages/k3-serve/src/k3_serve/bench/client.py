"""The client: sends a workload and notes when the bytes of each answer came.

While the load runs it only keeps bytes with their times; they are parsed afterwards, so that the
client takes as little as possible of cores that it may share with the server.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from k3_core.errors import K3Error
from k3_serve.bench.workloads import Call, Session, Workload

TIMEOUT = 600.0


@dataclass
class Exchange:
    """One request as it went: times in seconds after the start of the load."""

    call: Call
    index: int
    begin: float
    end: float = 0.0
    status: int = 0
    failure: str = ""
    pieces: list[tuple[float, bytes]] = field(default_factory=list)


@dataclass(frozen=True)
class Record:
    """What one request came to. `gaps` are the seconds between two events with text.

    `cached` and `latent` are prompt tokens that the prefix cache saved, and those whose latents it
    had (`k3_cache`; 0 where a server does not say).
    """

    group: str
    index: int
    begin: float
    ttft: float
    seconds: float
    gaps: tuple[float, ...]
    prompt_tokens: int
    output_tokens: int
    cached: int
    latent: int
    error: str = ""


class LoadClient:
    """Sends workloads to the server at `url`, such as http://127.0.0.1:8000."""

    def __init__(self, url: str, key: str = "", model: str = "") -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._model = model

    def run(self, workload: Workload) -> list[Record]:
        """Runs it to its end; records in the order of the workload's calls."""
        return [read(exchange) for exchange in asyncio.run(self._run(workload))]

    async def _run(self, workload: Workload) -> list[Exchange]:
        gate = asyncio.Semaphore(workload.concurrency or len(workload.sessions) or 1)
        async with self._client() as client:
            model = self._model or await _first_model(client)
            clock = Clock()
            starts = _numbered(workload)
            lists = await asyncio.gather(
                *(
                    _session(client, session, first, gate, clock, model)
                    for first, session in zip(starts, workload.sessions, strict=True)
                )
            )
        return [exchange for exchanges in lists for exchange in exchanges]

    @asynccontextmanager
    async def _client(self) -> AsyncIterator[httpx.AsyncClient]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(
            base_url=self._url,
            headers=self._headers,
            limits=limits,
            timeout=TIMEOUT,
            trust_env=False,
        ) as client:
            yield client


class Clock:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._zero = time.perf_counter()

    def now(self) -> float:
        """The time now."""
        return time.perf_counter() - self._zero


def _numbered(workload: Workload) -> list[int]:
    """The number of each session's first call."""
    starts, total = [], 0
    for session in workload.sessions:
        starts.append(total)
        total += len(session.calls)
    return starts


async def _first_model(client: httpx.AsyncClient) -> str:
    try:
        response = await client.get("/v1/models")
        return str(response.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise K3Error(
            f"{client.base_url} names no model ({error!r}); start `k3 serve`, or see --url"
        ) from error


async def _session(
    client: httpx.AsyncClient,
    session: Session,
    first: int,
    gate: asyncio.Semaphore,
    clock: Clock,
    model: str,
) -> list[Exchange]:
    if (wait := session.at - clock.now()) > 0:
        await asyncio.sleep(wait)
    async with gate:
        done = []
        for index, call in enumerate(session.calls, first):
            exchange = Exchange(call, index, clock.now())
            await _exchange(client, exchange, clock, model)
            exchange.end = clock.now()
            done.append(exchange)
        return done


async def _exchange(
    client: httpx.AsyncClient, exchange: Exchange, clock: Clock, model: str
) -> None:
    call = exchange.call
    body = {**call.body, "model": model, "stream": True, "stream_options": {"include_usage": True}}
    try:
        async with client.stream("POST", call.path, json=body) as response:
            exchange.status = response.status_code
            async for piece in response.aiter_raw():
                exchange.pieces.append((clock.now(), piece))
    except httpx.HTTPError as error:
        exchange.failure = f"{type(error).__name__}: {error}"


def read(exchange: Exchange) -> Record:
    """Parses what came back; a request that failed has an `error` and no figures."""
    group, index, begin = exchange.call.group, exchange.index, exchange.begin
    try:
        times, usage, cache = _parse(exchange)
        details = usage.get("prompt_tokens_details") or {}
        return Record(
            group,
            index,
            begin,
            times[0] - begin,
            exchange.end - begin,
            tuple(after - before for before, after in itertools.pairwise(times)),
            usage["prompt_tokens"],
            usage["completion_tokens"],
            details.get("cached_tokens") or 0,
            int(cache.get("mla_match", 0)),
        )
    except (ValueError, LookupError, TypeError) as error:
        seconds = exchange.end - begin
        return Record(group, index, begin, 0.0, seconds, (), 0, 0, 0, 0, str(error) or repr(error))


def _parse(exchange: Exchange) -> tuple[list[float], dict[str, Any], dict[str, Any]]:
    """Times of the events with text, the usage and `k3_cache`; ValueError for a failure."""
    content = b"".join(piece for _, piece in exchange.pieces)
    if exchange.failure:
        raise ValueError(exchange.failure)
    if exchange.status != 200:
        raise ValueError(f"status {exchange.status}: {content[:200].decode(errors='replace')}")
    times: list[float] = []
    usage: dict[str, Any] | None = None
    cache: dict[str, Any] = {}
    for at, data in _events(exchange.pieces):
        if data == b"[DONE]":
            break
        chunk = json.loads(data)
        if "error" in chunk:
            raise ValueError(f"broken off: {chunk['error']['message']}")
        if any(_has_text(choice) for choice in chunk["choices"]):
            times.append(at)
        usage = chunk.get("usage") or usage
        cache = chunk.get("k3_cache", cache)
    else:
        raise ValueError("the stream has no end")
    if not times:
        raise ValueError("the stream has no text")
    if usage is None:
        raise ValueError("the stream has no usage")
    return times, usage, cache


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta")
    if delta is None:
        return bool(choice.get("text"))
    return any(value for name, value in delta.items() if name != "role")


def _events(pieces: list[tuple[float, bytes]]) -> list[tuple[float, bytes]]:
    """The data of each server-sent event, with the time at which its end came."""
    found, buffer = [], b""
    for at, piece in pieces:
        *events, buffer = (buffer + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            data = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
            if data:
                found.append((at, b"\n".join(data)))
    return found
