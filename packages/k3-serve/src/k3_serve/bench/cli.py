"""The command `k3 bench serve`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from k3_serve.bench.client import LoadClient
from k3_serve.bench.figures import Report
from k3_serve.bench.plans import Plan
from k3_serve.bench.server import OwnServer
from k3_serve.cli import Device, Dtype, Experts

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Load on a server, measured from outside.",
)


@app.callback()
def bench() -> None:
    """Load on a server, measured from outside."""


Workload = Annotated[str, typer.Argument(help="synthetic, shared-prefix, agent or burst.")]
Url = Annotated[str, typer.Option(help="A running server; default: an own one on loopback.")]
Count = Annotated[int, typer.Option(min=0, help="Requests (agent: sessions); 0: the default.")]
Concurrency = Annotated[list[int], typer.Option(min=1, help="Requests at a time; repeatable.")]
Rate = Annotated[float, typer.Option(min=0, help="Requests a second instead; burst: of short.")]
Fixed = Annotated[bool, typer.Option("--fixed", help="Arrivals at equal distances.")]
Budgets = Annotated[bool, typer.Option("--without-budgets", help="Own server: one class for all.")]


@app.command()
def serve(
    workload: Workload = "synthetic",
    url: Url = "",
    model: Annotated[str, typer.Option(help="Of the own server; with --url its name.")] = "",
    device: Device = "cpu",
    dtype: Dtype = "float32",
    experts: Experts = "packed",
    max_batch: Annotated[int, typer.Option(min=1, help="Requests that run together.")] = 8,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0: one core less.")] = 0,
    without_budgets: Budgets = False,
    seed: Annotated[int, typer.Option(help="The same seed gives the same load.")] = 0,
    requests: Count = 0,
    concurrency: Concurrency = [1, 8],  # noqa: B006  Typer copies it
    rate: Rate = 0.0,
    fixed: Fixed = False,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Of a synthetic request.")] = 200,
    output_tokens: Annotated[int, typer.Option(min=0, help="Of an answer; 0: default.")] = 0,
    prefix_tokens: Annotated[int, typer.Option(min=1, help="Shared by requests.")] = 4_000,
    new_tokens: Annotated[int, typer.Option(min=1, help="Of each after the prefix.")] = 64,
    prefixes: Annotated[int, typer.Option(min=1, help="Different prefixes.")] = 3,
    turns: Annotated[int, typer.Option(min=1, help="Of an agent's session.")] = 9,
    out: Annotated[Path | None, typer.Option(help="Write the figures to this JSON file.")] = None,
) -> None:
    """Measure a server of the OpenAI API; the client has a process of its own.

    Prompts are token ids, which this server, vLLM and SGLang take; agent needs text only. A key
    for --url is taken from K3_API_KEYS. Exit code 1 when a request failed.
    """
    plan = Plan(
        seed=seed,
        num_requests=requests,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        concurrency=tuple(concurrency),
        rate=rate,
        is_poisson=not fixed,
        prefix_tokens=prefix_tokens,
        new_tokens=new_tokens,
        num_prefixes=prefixes,
        num_turns=turns,
    )
    own = OwnServer(
        model or "k3-nano", device, dtype, experts, max_batch, threads, not without_budgets
    )
    key = os.environ.get("K3_API_KEYS", "").split(",")[0].strip() if url else ""
    with _target(url, own) as (address, server):
        figures, ratios = plan.run(workload, LoadClient(address, key, model if url else ""))
    report = Report(workload, seed, server, tuple(figures), ratios)
    report.show()
    if out is not None:
        report.write(out)
    raise typer.Exit(1 if report.num_errors else 0)


@contextmanager
def _target(url: str, own: OwnServer) -> Iterator[tuple[str, dict[str, Any]]]:
    """Address of the server to measure, and what to say of it."""
    if url:
        yield url, {"url": url}
        return
    with own.running() as address:
        yield address, asdict(own)
