"""`k3 demo`: starts the server, asks it ten unseen questions over HTTP, and counts the right ones.

Design 9: the main job of a fresh installation. The questions are those of `k3_core.tasks`, drawn
from the held-out part by a seed; one family needs a tool, which this program carries out.
"""

from __future__ import annotations

import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from k3_core.cli.chat_client import ChatClient
from k3_core.cli.lazy import CommandRegistry
from k3_core.errors import K3Error
from k3_core.plugins import ensure_plugins
from k3_core.tasks import EFFORTS, FAMILIES, Question, draw

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

NUM_QUESTIONS = 10
NUM_NEEDED = 8
START_SECONDS = 180
"""The first start on a machine compiles loops: 40 s on two cores, more where they are busy."""
OPTIONS = {"temperature": 0, "max_completion_tokens": 256}


@app.command()
def demo(
    seed: Annotated[
        int | None, typer.Option(help="Which questions are asked; default: today's date.")
    ] = None,
    model: Annotated[str, typer.Option(help="A bundled model or a folder.")] = "k3-nano",
) -> None:
    """Ask a model ten questions through its server; exit code 0 when at least eight are right."""
    from rich.console import Console

    started = time.monotonic()
    console = Console(highlight=False, markup=False, emoji=False)
    seed = int(f"{date.today():%Y%m%d}") if seed is None else seed
    console.print(f"{NUM_QUESTIONS} unseen questions to {model}, --seed {seed}", style="bold")
    times: list[float] = []
    num_right = 0
    with running_server(model) as client:
        name = client.model()
        for number, (question, effort) in enumerate(draw_questions(seed), 1):
            console.print(f"\n{number}. ({effort} effort) {question.prompt}", style="bold")
            is_right = ask(client, name, question, effort, console)
            num_right += is_right
            verdict = "right" if is_right else f"wrong, it is {question.answer}"
            console.print(f"-> {verdict}", style="green" if is_right else "red")
            times.append(time.monotonic() - started)
    console.print(f"\nfirst answer after {times[0]:.1f} s, all after {times[-1]:.1f} s")
    console.print(f"right: {num_right}/{NUM_QUESTIONS}", style="bold")
    raise typer.Exit(0 if num_right >= NUM_NEEDED else 1)


def draw_questions(seed: int) -> list[tuple[Question, str]]:
    """Ten different held-out questions with their efforts, at least two of each family."""
    rng = random.Random(seed)
    families = [*FAMILIES, *FAMILIES, *rng.sample(FAMILIES, NUM_QUESTIONS - 2 * len(FAMILIES))]
    drawn: dict[str, Question] = {}
    for number, family in enumerate(families, 1):
        while len(drawn) < number:
            question = draw(family, rng, "test")
            drawn.setdefault(f"{family}:{question.key}", question)
    efforts = [EFFORTS[number % len(EFFORTS)] for number in range(NUM_QUESTIONS)]
    return list(zip(drawn.values(), efforts, strict=True))


def ask(client: ChatClient, model: str, question: Question, effort: str, console: Console) -> bool:
    """Streams the answer to the console, with one round of tool calls; whether it is right."""
    body = {"model": model, "reasoning_effort": effort, **OPTIONS}
    if question.tools:
        body["tools"] = question.tools
    messages = list(question.messages)
    turn, finish_reason = _stream(client, {**body, "messages": messages}, console)
    if question.tools:
        if finish_reason != "tool_calls":
            return False
        messages.append(turn)
        for call in turn["tool_calls"]:
            result = question.tool_result(call)
            console.print(f"   tool: {result}", style="cyan")
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        turn, finish_reason = _stream(client, {**body, "messages": messages}, console)
    return finish_reason == "stop" and question.check(turn.get("content") or "")


def _stream(
    client: ChatClient, body: dict[str, Any], console: Console
) -> tuple[dict[str, Any], str | None]:
    """The assistant's message and why it ended."""
    from k3_core.cli.transcript import Transcript
    from k3_core.engine.wire import add_delta

    message: dict[str, Any] = {"role": "assistant", "content": None}
    finish_reason = None
    transcript = Transcript(console, indent="   ")
    for chunk in client.stream(body):
        for choice in chunk["choices"]:
            transcript.show(choice["delta"])
            add_delta(message, choice["delta"])
            finish_reason = choice["finish_reason"]
    console.print()
    return message, finish_reason


@contextmanager
def running_server(model: str) -> Iterator[ChatClient]:
    """`k3 serve` in a process of its own on a free loopback port; ended with the block.

    K3Error when the command is not installed or the server does not come up.
    """
    if CommandRegistry.collect(ensure_plugins()).get("serve") is None:
        raise K3Error("`k3 demo` needs the server; run: pip install k3-serve")
    port = _free_port()
    # One small sequence at a time: more threads would only wait for each other.
    options = ["--port", str(port), "--threads", "1", "--experts", "dequantized"]
    command = [sys.executable, "-m", "k3_core.cli.app", "serve", model, *options]
    with _unwound_by_sigterm(), tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            client = ChatClient(f"http://127.0.0.1:{port}")
            try:
                client.wait_until_healthy(START_SECONDS, lambda: process.poll() is None)
            except K3Error as error:
                raise K3Error(f"{error}; it said:\n{_tail(log)}") from error
            yield client
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                pass
            finally:  # a second Ctrl-C too leaves no server behind
                process.kill()
                process.wait()


@contextmanager
def _unwound_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the program as Ctrl-C does: through every `finally`, and so with its server."""
    previous = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _tail(log: IO[bytes]) -> str:
    log.seek(0)
    return log.read()[-2000:].decode("utf-8", "replace").strip()
