"""The HTTP application, on the `Engine` protocol only (serving 4c and 9d)."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from k3_core.engine import Engine
from k3_serve.__about__ import __version__
from k3_serve.api import chat, completions, sse
from k3_serve.api.answers import ERRORS, ChatCompletion, TextCompletion, streamed
from k3_serve.api.responses import add_responses
from k3_serve.api.schemas import ChatRequest, CompletionRequest, SamplingFields
from k3_serve.api.service import Service, salt_of
from k3_serve.api.tokens import add_tokens
from k3_serve.ops.install import install_guards
from k3_serve.ops.metrics import Metrics
from k3_serve.ops.page import add_page
from k3_serve.ops.state import ServerState
from k3_serve.ops.status import add_status
from k3_serve.settings import Settings

if TYPE_CHECKING:
    from k3_core.tokenizer import K3Tokenizer


def create_app(
    engine: Engine,
    tokenizer: K3Tokenizer,
    model_id: str,
    settings: Settings | None = None,
    metrics: Metrics | None = None,
) -> FastAPI:
    """The application that serves one model under the name `model_id`.

    Its `state.server` is the `ServerState` that a drain and the admin plane change.
    """
    settings = settings or Settings()
    metrics = metrics or Metrics(model_id, has_vllm_names=settings.has_vllm_names)
    service = Service(engine, tokenizer, model_id, settings, metrics)
    app = FastAPI(title="k3-serve", version=__version__, responses=ERRORS)
    app.state.server = ServerState(engine)
    install_guards(app, settings, app.state.server)
    add_page(app)
    add_status(app, engine, model_id, metrics, app.state.server)
    _add_models(app, service)
    _add_completions(app, service)
    add_responses(app, service)
    add_tokens(app, service)
    return app


def _add_models(app: FastAPI, service: Service) -> None:
    model = {
        "id": service.model_id,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "k3",
        "max_model_len": service.engine.max_length,
    }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return model


def _add_completions(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions", response_model=None, responses=streamed(ChatCompletion))
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        service.check_model(body.model)
        prepared = await chat.prepare_async(body, service, salt_of(request))
        run = service.run(prepared.requests, "messages")
        chunks = chat.chat_chunks(body, prepared, run, service)
        if not body.stream:
            return await sse.answer(request, run, chunks, chat.fold_chat)
        return await sse.stream(request, run, chunks, _writer(body), end=b"data: [DONE]\n\n")

    @app.post("/v1/completions", response_model=None, responses=streamed(TextCompletion))
    async def text_completions(body: CompletionRequest, request: Request) -> Response:
        service.check_model(body.model)
        salt = salt_of(request)
        prompts, requests = await asyncio.to_thread(completions.prepare, body, service, salt)
        run = service.run(requests, "prompt")
        chunks = completions.completion_chunks(body, prompts, run, service.tokenizer)
        if not body.stream:
            return await sse.answer(request, run, chunks, completions.fold_completion)
        return await sse.stream(request, run, chunks, _writer(body), end=b"data: [DONE]\n\n")


def _writer(body: SamplingFields) -> sse.Write:
    """Chunks as events; the one without choices, which has the usage, only when asked for."""
    has_usage = body.stream_options is not None and body.stream_options.include_usage

    def write(chunk: sse.Item) -> bytes | None:
        if has_usage:
            return sse.data({"usage": None, **chunk})
        return sse.data(chunk) if chunk["choices"] else None

    return write
