"""A scripted engine and a byte-level tokenizer, so that every token of an answer is chosen."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import torch
import uvicorn
from hypothesis import settings

from k3_core import K3Tokenizer
from k3_core.engine import Event, EventStream, Request, Stats, TokenLogprob, fold_events
from k3_core.engine.stops import StopWatch
from k3_serve.api.app import create_app
from k3_serve.limits import Limits
from k3_serve.settings import Settings

settings.register_profile("dev", max_examples=20, deadline=None)
settings.register_profile("ci", max_examples=40, deadline=None, derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))
torch.set_num_threads(1)
MODEL = "scripted"
LOGPROB = -0.5


class ScriptedEngine:
    """Answers request i with script i (the last one repeats), by the rules of the protocol.

    The end of a script counts as the length limit, or is the `failure` when one is set. With
    `hold_after` a request stands still after that many tokens until it is aborted.
    """

    max_length = 4096

    def __init__(self, tokenizer: K3Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.scripts: list[list[int]] = [[]]
        self.hold_after: int | None = None
        self.failure: str | None = None
        self.requests: list[Request] = []
        self.aborted: list[str] = []

    def submit(self, request: Request) -> EventStream:
        if len(request.token_ids) + (request.sampling.max_tokens or 0) > self.max_length:
            raise ValueError(f"the request exceeds the context of {self.max_length} tokens")
        if any(not 0 <= i < self.tokenizer.vocab_size for i in request.sampling.logit_bias):
            raise ValueError("a logit_bias id is outside the vocabulary")
        index = len(self.requests)
        self.requests.append(request)
        handle = EventStream(f"request-{index}", len(request.token_ids))
        if request.sampling.has_prompt_logprobs:
            scored = [TokenLogprob(i, LOGPROB, ((i, LOGPROB),)) for i in request.token_ids]
            handle.prompt_logprobs = (None, *scored[1:])
        self._play(handle, request, self.scripts[min(index, len(self.scripts) - 1)])
        return handle

    def _play(self, handle: EventStream, request: Request, script: Sequence[int]) -> None:
        sampling = request.sampling
        watch = StopWatch(sampling, self.tokenizer, request.channel)
        constraint = request.constraint and request.constraint.clone()
        script = script[: sampling.max_tokens]
        for count, token_id in enumerate(script[: self.hold_after], 1):
            if constraint is not None:
                if not constraint.allowed_mask(self.tokenizer.vocab_size)[token_id]:
                    problem = f"token {count} of the script is not allowed"
                    handle.put(Event(None, None, (), 0, "error", problem))
                    return
                constraint.advance(token_id)
            is_stop = token_id in sampling.stop_ids or watch.feed(token_id)
            is_last = count == len(script) and self.failure is None
            reason = "stop" if is_stop else "length" if is_last else None
            top = tuple((token_id + i, LOGPROB - i) for i in range(sampling.top_logprobs))
            handle.put(Event(token_id, LOGPROB, top, 0, reason))
            if reason:
                return
        if self.failure is not None:
            handle.put(Event(None, None, (), 0, "error", self.failure))
        elif not script:
            handle.put(Event(None, None, (), 0, "length"))

    def abort(self, handle: EventStream) -> None:
        self.aborted.append(handle.request_id)
        handle.put(Event(None, None, (), 0, "abort"))

    def stats(self) -> Stats:
        num_ended = len(set(self.aborted)) if self.hold_after else len(self.requests)
        running = len(self.requests) - num_ended
        return Stats(0, running, num_ended, 0, 0, 0, 0)

    def generate(self, requests: list[Request]) -> list[Any]:
        return [fold_events(list(self.submit(request))) for request in requests]


@pytest.fixture(scope="session")
def tokenizer() -> K3Tokenizer:
    return K3Tokenizer({bytes([i]): i for i in range(256)}, 256)


@pytest.fixture
def engine(tokenizer: K3Tokenizer) -> ScriptedEngine:
    return ScriptedEngine(tokenizer)


@pytest.fixture
def script(tokenizer: K3Tokenizer) -> Callable[[str], list[int]]:
    """Ids of a text in which `<|open|>` and the like are control tokens."""
    return lambda text: tokenizer.encode(text, allow_special=True)


class Api:
    """Calls the application in process."""

    def __init__(self, app: Any) -> None:
        self._app = app

    def request(self, method: str, path: str, **fields: Any) -> httpx.Response:
        async def call() -> httpx.Response:
            transport = httpx.ASGITransport(self._app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://k3") as client:
                return await client.request(method, path, **fields)

        return asyncio.run(call())

    def chat(self, **fields: Any) -> httpx.Response:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}
        headers = {"Content-Type": "application/json"}
        content = json.dumps(body).encode()  # unlike httpx, it can say NaN
        return self.request("POST", "/v1/chat/completions", content=content, headers=headers)

    def complete(self, **fields: Any) -> httpx.Response:
        return self.request("POST", "/v1/completions", json={"model": MODEL, **fields})


def events_of(response: httpx.Response) -> list[Any]:
    """The data of a stream of server-sent events, the closing `[DONE]` as a string."""
    assert response.headers["content-type"].startswith("text/event-stream")
    pieces = [piece for piece in response.text.split("\n\n") if piece]
    assert all(piece.startswith("data: ") for piece in pieces)
    data = [piece.removeprefix("data: ") for piece in pieces]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


@pytest.fixture
def read_events() -> Callable[[httpx.Response], list[Any]]:
    return events_of


@pytest.fixture
def app(engine: ScriptedEngine, tokenizer: K3Tokenizer) -> Any:
    limits = Limits(max_body_bytes=200_000, max_images=2, max_image_pixels=10_000, max_prompts=8)
    return create_app(engine, tokenizer, MODEL, Settings(limits))


@pytest.fixture
def api_of() -> type[Api]:
    return Api


@pytest.fixture
def api(app: Any) -> Api:
    return Api(app)


@contextmanager
def serving(app: Any) -> Iterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()


@pytest.fixture
def serving_of() -> Callable[[Any], Any]:
    """Serves an application on a loopback socket while a `with` block lasts."""
    return serving


@pytest.fixture
def url(app: Any) -> Iterator[str]:
    """The application on a loopback socket."""
    with serving(app) as address:
        yield address
