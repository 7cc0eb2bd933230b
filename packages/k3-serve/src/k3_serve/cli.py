"""The commands `k3 serve` and `k3 chat`; FastAPI and torch are imported when one runs."""

from __future__ import annotations

import signal
import socket
import sys
from typing import Annotated

import typer

from k3_core.errors import K3Error

Model = Annotated[str, typer.Argument(help="A model folder, or a bundled model's name.")]
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")]
Experts = Annotated[str, typer.Option(help="packed (small) or dequantized (fast on a CPU).")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16 or auto.")]


def serve(
    model: Model = "k3-nano",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    experts: Experts = "packed",
    max_batch: Annotated[int, typer.Option(min=1, help="Requests that run together.")] = 8,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0 leaves the default.")] = 0,
) -> None:
    """Serve a model over HTTP as OpenAI's chat and text completions."""
    # Before the model is loaded: a taken port is known at once.
    listener = bind(host, port)
    import torch
    import uvicorn

    from k3_core.engine.load import load_engine
    from k3_serve.api.app import create_app

    if threads:
        torch.set_num_threads(threads)
    engine, tokenizer = load_engine(
        model, device=device, dtype=dtype, experts=experts, max_batch=max_batch
    )
    with engine, listener:
        app = create_app(engine, tokenizer, model_name(model))
        host, port = listener.getsockname()[:2]
        typer.echo(
            f"{model} in {dtype} on {device}, context {engine.max_length} tokens, "
            f"listening on http://{host}:{port}"
        )
        # uvicorn drains, then raises the signal again for the handler that was there before.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5)
        uvicorn.Server(config).run(sockets=[listener])


def chat(
    model: Model = "k3-nano",
    url: Annotated[str, typer.Option(help="A running server; default: in this process.")] = "",
    effort: Annotated[str, typer.Option(help="low, high, max or none.")] = "low",
    system: Annotated[str, typer.Option(help="A system message to begin with.")] = "",
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest.")] = 0.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 1024,
    device: Device = "cpu",
    dtype: Dtype = "float32",
) -> None:
    """Talk to a model in the terminal; an empty line or Ctrl-D ends."""
    from k3_serve.terminal import Conversation, LocalBackend, talk

    options = {
        "reasoning_effort": effort,
        "temperature": temperature,
        "max_completion_tokens": max_tokens,
    }
    if url:
        from k3_core.cli.chat_client import ChatClient

        client = ChatClient(url)
        talk(Conversation(client.stream, {"model": client.model(), **options}, system))
        return
    from k3_core.engine.load import load_engine

    engine, tokenizer = load_engine(model, device=device, dtype=dtype, max_batch=1)
    with engine, LocalBackend(engine, tokenizer) as backend:
        talk(Conversation(backend.stream, {"model": model_name(model), **options}, system))


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


def model_name(model: str) -> str:
    """The name that clients use: the last part of a path, or the bundled name."""
    return model.rstrip("/").rsplit("/", 1)[-1] or model
