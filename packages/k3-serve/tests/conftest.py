"""The scripted engine over a byte-level tokenizer: every token of an answer is chosen."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import torch
import uvicorn
from hypothesis import settings

from k3_core import K3Tokenizer
from k3_serve.api.app import create_app
from k3_serve.limits import Limits
from k3_serve.settings import Settings
from k3_serve.testing import ScriptedEngine

settings.register_profile("dev", max_examples=20, deadline=None)
settings.register_profile("ci", max_examples=40, deadline=None, derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))
torch.set_num_threads(1)
MODEL = "scripted"


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
