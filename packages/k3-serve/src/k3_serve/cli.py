"""The commands `k3 serve` and `k3 chat`; FastAPI and torch are imported when one runs."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from k3_core.errors import K3Error

if TYPE_CHECKING:
    from k3_serve.settings import Settings

Model = Annotated[str, typer.Argument(help="A model folder, or a bundled model's name.")]
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")]
Experts = Annotated[str, typer.Option(help="packed (small) or dequantized (for long prefills).")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16 or auto.")]
ADMIN = "Port of the admin plane on 127.0.0.1; 0 takes a free one."
ROOTS = "Folder that new weights may come from."
PROFILE = "kimi: the fixed parameters of the hosted API; open: none."
SIZE = "Memory of the prefix cache, as in 4GB; default 1GiB, of a GPU 80% of what is free."
CPU_CACHE = "Host memory for what the cache evicts; none by default."
DISK_CACHE = "Folder for what that memory has no room for."
DISK_SIZE = "Bound of its files; default 10GiB."
UNIT = "Tokens between two places at which a cached prefix may end."
BUDGET = "Most rows of a step; default 256, on a GPU 4096."
DRAFT = "Speculative decoding: ngram (repetition) or mtp (the model's own layer)."
HOSTS = "Host that images may be fetched from by https; none by default."


def serve(
    model: Model = "k3-nano",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    experts: Experts = "packed",
    max_batch: Annotated[int, typer.Option(min=1, help="Requests that run together.")] = 8,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0: one core less.")] = 0,
    cache_size: Annotated[str, typer.Option(help=SIZE)] = "",
    cpu_cache: Annotated[str, typer.Option(help=CPU_CACHE)] = "",
    disk_cache: Annotated[Path | None, typer.Option(help=DISK_CACHE)] = None,
    disk_cache_size: Annotated[str, typer.Option(help=DISK_SIZE)] = "",
    unit: Annotated[int | None, typer.Option(min=1, help=UNIT)] = None,
    token_budget: Annotated[int | None, typer.Option(min=1, help=BUDGET)] = None,
    draft: Annotated[str | None, typer.Option(help=DRAFT)] = None,
    draft_tokens: Annotated[int, typer.Option(min=1, help="Most drafted tokens a step.")] = 4,
    api_key_file: Annotated[Path | None, typer.Option(help="Keys of clients, one a line.")] = None,
    without_keys: Annotated[bool, typer.Option(help="Let everybody in from anywhere.")] = False,
    admin_port: Annotated[int | None, typer.Option(min=0, max=65535, help=ADMIN)] = None,
    admin_socket: Annotated[Path | None, typer.Option(help="Admin plane, Unix socket.")] = None,
    admin_key_file: Annotated[Path | None, typer.Option(help="Keys of that plane.")] = None,
    weights_root: Annotated[list[Path] | None, typer.Option(help=ROOTS)] = None,
    media_host: Annotated[list[str] | None, typer.Option(help=HOSTS)] = None,
    cors_origin: Annotated[list[str] | None, typer.Option(help="Origin of a web page.")] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate chain, PEM.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its private key, PEM.")] = None,
    drain: Annotated[float, typer.Option(min=0, help="Seconds after SIGTERM.")] = 30.0,
    max_body: Annotated[int, typer.Option(min=1, help="Largest request in MiB.")] = 32,
    profile: Annotated[str, typer.Option(help=PROFILE)] = "open",
    vllm_metrics: Annotated[bool, typer.Option(help="Add metric names of vLLM.")] = False,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "warning",
) -> None:
    """Serve a model over HTTP as OpenAI's chat and text completions.

    Keys come from K3_API_KEYS and K3_ADMIN_KEYS (separated by commas) or from files.
    """
    from k3_serve.ops.command import AdminPlane, ModelChoice, Server
    from k3_serve.ops.run import Tls
    from k3_serve.ops.sizes import CacheChoice

    set_log_level(log_level)
    Server(
        model=ModelChoice(model, device, dtype, experts, max_batch, threads, draft, draft_tokens),
        host=host,
        port=port,
        settings=_settings(
            max_body, api_key_file, cors_origin, media_host, drain, vllm_metrics, profile
        ),
        is_open=without_keys,
        tls=Tls.read(tls_cert, tls_key),
        cache=CacheChoice.read(
            cache_size, cpu_cache, disk_cache, disk_cache_size, unit, token_budget
        ),
        admin=AdminPlane.read(admin_port, admin_socket, admin_key_file, weights_root or ()),
    ).run(typer.echo)


def _settings(
    max_body: int,
    key_file: Path | None,
    origins: list[str] | None,
    media_hosts: list[str] | None,
    drain: float,
    has_vllm_names: bool,
    profile: str,
) -> Settings:
    from k3_serve.limits import Limits
    from k3_serve.ops.auth import API_KEYS, KeyRing
    from k3_serve.ops.fetch import MediaPolicy
    from k3_serve.settings import Settings

    return Settings(
        limits=Limits(max_body_bytes=max_body * 2**20),
        keys=KeyRing.read(API_KEYS, key_file),
        cors_origins=tuple(origins or ()),
        media=MediaPolicy(frozenset(media_hosts or ())),
        drain_seconds=drain,
        has_vllm_names=has_vllm_names,
        profile=profile,
    )


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


def set_log_level(name: str) -> None:
    """Logs of this level and above go to the standard error; K3Error for an unknown one."""
    levels = ("debug", "info", "warning", "error")
    if name not in levels:
        raise K3Error(f"log level {name!r} is not one of {', '.join(levels)}")
    logging.basicConfig(level=name.upper(), format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs whole addresses


def model_name(model: str) -> str:
    """The name that clients use: the last part of a path, or the bundled name."""
    return model.rstrip("/").rsplit("/", 1)[-1] or model
