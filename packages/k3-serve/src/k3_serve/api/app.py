"""The HTTP application, on the `Engine` protocol only (serving 4c and 9d)."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from k3_core.engine import Engine
from k3_serve.__about__ import __version__
from k3_serve.api import chat, completions
from k3_serve.api.errors import ApiError, unexpected
from k3_serve.api.fold import Chunk
from k3_serve.api.runs import Run, on_disconnect
from k3_serve.api.schemas import ChatRequest, CompletionRequest, SamplingFields
from k3_serve.ops.install import install_guards
from k3_serve.ops.metrics import Metrics
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
    limits = settings.limits
    metrics = metrics or Metrics(model_id, has_vllm_names=settings.has_vllm_names)
    app = FastAPI(title="k3-serve", version=__version__)
    app.state.server = ServerState(engine)
    install_guards(app, settings, app.state.server)
    add_status(app, engine, model_id, metrics, app.state.server)
    _add_models(app, model_id, engine.max_length)

    @app.post("/v1/chat/completions", response_model=None)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        _check_model(body.model, model_id)
        prepared = await asyncio.to_thread(chat.prepare, body, tokenizer, limits)
        run = Run(engine, prepared.requests, "messages", metrics)
        chunks = chat.chat_chunks(body, prepared, run, tokenizer)
        return await _answer(request, body, run, chunks, chat.fold_chat)

    @app.post("/v1/completions", response_model=None)
    async def text_completions(body: CompletionRequest, request: Request) -> Response:
        _check_model(body.model, model_id)
        prepare = completions.prepare
        prompts, requests = await asyncio.to_thread(prepare, body, tokenizer, limits)
        run = Run(engine, requests, "prompt", metrics)
        chunks = completions.completion_chunks(body, prompts, run, tokenizer)
        return await _answer(request, body, run, chunks, completions.fold_completion)

    return app


def _add_models(app: FastAPI, model_id: str, max_length: int) -> None:
    model = {
        "id": model_id,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "k3",
        "max_model_len": max_length,
    }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        _check_model(name, model_id)
        return model


def _check_model(name: str, model_id: str) -> None:
    if name != model_id:
        raise ApiError(
            404,
            f"model {name[:200]!r} does not exist; this server has {model_id!r}",
            param="model",
            code="model_not_found",
        )


async def _answer(
    request: Request,
    body: SamplingFields,
    run: Run,
    chunks: AsyncIterator[Chunk],
    fold: Callable[[Iterable[Chunk]], Chunk],
) -> Response:
    """The stream of the chunks, or their fold. A client that goes away aborts the run."""
    if not body.stream:
        async with on_disconnect(request, run.abort):
            return JSONResponse(fold([chunk async for chunk in chunks]))
    async with on_disconnect(request, run.abort):
        first = await anext(chunks)  # a request that fails at once still gets an error status
    has_usage = body.stream_options is not None and body.stream_options.include_usage
    events = _server_sent(request, run, first, chunks, has_usage)
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(events, media_type="text/event-stream", headers=headers)


async def _server_sent(
    request: Request, run: Run, first: Chunk, rest: AsyncIterator[Chunk], has_usage: bool
) -> AsyncIterator[str]:
    """Server-sent events: the chunks and `[DONE]`, or an error event that ends the stream."""

    def data(chunk: Chunk) -> str:
        shown = {"usage": None, **chunk} if has_usage else chunk
        return f"data: {json.dumps(shown, ensure_ascii=False)}\n\n"

    async with on_disconnect(request, run.abort):
        try:
            yield data(first)
            async for chunk in rest:
                if has_usage or chunk["choices"]:
                    yield data(chunk)
        except Exception as error:
            known = error if isinstance(error, ApiError) else unexpected(error)
            yield f"data: {json.dumps(known.body, ensure_ascii=False)}\n\n"
            return
        finally:
            run.abort()
    yield "data: [DONE]\n\n"
