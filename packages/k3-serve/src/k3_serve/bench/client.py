"""The client: sends a workload and notes when the bytes of each answer came.

While the load runs it only keeps bytes with their times (`wire`); they are parsed afterwards, so
that the client takes as little as possible of cores that it may share with the server.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from k3_core.errors import K3Error
from k3_serve.bench.wire import Pieces, opened, post
from k3_serve.bench.workloads import Call, Session, Workload

TIMEOUT = 600.0


@dataclass
class Exchange:
    """One request as it went: times in seconds after the start of the load.

    `received` is all that the connection brought, `pieces` the body that was in it.
    """

    call: Call
    index: int
    begin: float
    end: float = 0.0
    status: int = 0
    failure: str = ""
    pieces: Pieces = field(default_factory=list)
    received: Pieces = field(default_factory=list)


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
        """Raises K3Error for what is no such address."""
        self._url = url.rstrip("/").removesuffix("/v1")
        if not self._url.startswith(("http://", "https://")):
            raise K3Error(f"{url!r} is no address; give one such as http://127.0.0.1:8000")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._model = model

    def run(self, workload: Workload) -> list[Record]:
        """Runs it to its end; records in the order of the workload's calls."""
        model = self._model or self._first_model()
        exchanges = asyncio.run(self._run(workload, model))
        for exchange in exchanges:
            _open(exchange)
        return [read(exchange) for exchange in exchanges]

    async def _run(self, workload: Workload, model: str) -> list[Exchange]:
        gate = asyncio.Semaphore(workload.concurrency or len(workload.sessions) or 1)
        clock = Clock()
        lists = await asyncio.gather(
            *(
                self._session(session, first, gate, clock, model)
                for first, session in zip(_numbered(workload), workload.sessions, strict=True)
            )
        )
        return [exchange for exchanges in lists for exchange in exchanges]

    def _first_model(self) -> str:
        try:
            response = httpx.get(
                f"{self._url}/v1/models", headers=self._headers, timeout=TIMEOUT, trust_env=False
            )
            return str(response.json()["data"][0]["id"])
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            raise K3Error(
                f"{self._url} names no model ({error!r}); start `k3 serve`, or see --url"
            ) from error

    async def _session(
        self, session: Session, first: int, gate: asyncio.Semaphore, clock: Clock, model: str
    ) -> list[Exchange]:
        if (wait := session.at - clock.now()) > 0:
            await asyncio.sleep(wait)
        async with gate:
            done = []
            for index, call in enumerate(session.calls, first):
                exchange = Exchange(call, index, clock.now())
                await self._exchange(exchange, clock, model)
                exchange.end = clock.now()
                done.append(exchange)
            return done

    async def _exchange(self, exchange: Exchange, clock: Clock, model: str) -> None:
        call = exchange.call
        options = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
        url = httpx.URL(self._url + call.path)
        try:
            exchange.received = await post(
                url, self._headers, {**call.body, **options}, now=clock.now, silence=TIMEOUT
            )
        except OSError as error:
            exchange.failure = f"{type(error).__name__}: {error}"


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


def _open(exchange: Exchange) -> None:
    """Finds status and body in what was received."""
    if exchange.failure:
        return
    try:
        exchange.status, exchange.pieces = opened(exchange.received)
    except ValueError as error:
        exchange.failure = str(error)


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


def _events(pieces: Pieces) -> Pieces:
    """The data of each server-sent event, with the time at which its end came."""
    found, buffer = [], b""
    for at, piece in pieces:
        *events, buffer = (buffer + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            data = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
            if data:
                found.append((at, b"\n".join(data)))
    return found
