"""`k3 generate MODEL -p TEXT`: continue a text, or with --chat answer a message."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Annotated

import typer

from k3_core.errors import K3Error

if TYPE_CHECKING:
    from rich.console import Console

    from k3_core.engine import Engine, Event, Sampling
    from k3_core.tokenizer import K3Tokenizer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def generate(
    model: Annotated[str, typer.Argument(help="A model folder, or a bundled model's name.")],
    prompt: Annotated[str, typer.Option("-p", "--prompt", help="The text to continue.")],
    chat: Annotated[bool, typer.Option("--chat", help="The text is a user's message.")] = False,
    effort: Annotated[str, typer.Option(help="low, high or max, with --chat.")] = "max",
    max_tokens: Annotated[int, typer.Option(min=0, help="Longest output.")] = 256,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Probability kept, in (0, 1].")] = 0.95,
    seed: Annotated[int | None, typer.Option(help="Repeats an output.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or auto.")] = "float32",
) -> None:
    """Print what the model makes of a text, as it comes."""
    from rich.console import Console

    from k3_core.engine import Sampling
    from k3_core.engine.load import load_engine

    engine, tokenizer = load_engine(model, device=device, dtype=dtype, max_batch=1)
    console = Console()
    with engine:
        try:
            sampling = Sampling(
                max_tokens=max_tokens,
                temperature=temperature,
                top_p=top_p,
                seed=seed,
                stop_ids=tuple(tokenizer.stop_ids),
            )
            if chat:
                _answer(engine, tokenizer, prompt, effort, sampling, console)
            else:
                _continue(engine, tokenizer, prompt, sampling, console)
        except ValueError as error:
            raise K3Error(str(error)) from error
    console.print()


def _continue(
    engine: Engine, tokenizer: K3Tokenizer, prompt: str, sampling: Sampling, console: Console
) -> None:
    from k3_core.cli.transcript import write
    from k3_core.tokenizer import Utf8Stream

    tokens = _tokens(engine, tuple(tokenizer.encode(prompt)), sampling)
    write(console, prompt, "dim")
    text = Utf8Stream()
    for token_id in tokens:
        if token_id not in tokenizer.stop_ids:
            write(console, text.feed(tokenizer.token_bytes(token_id)))
    write(console, text.flush())


def _answer(
    engine: Engine,
    tokenizer: K3Tokenizer,
    prompt: str,
    effort: str,
    sampling: Sampling,
    console: Console,
) -> None:
    from k3_core.cli.transcript import Transcript
    from k3_core.xtml import ContentDelta, ReasoningDelta, XtmlParser

    messages = [{"role": "user", "content": prompt}]
    ids = tokenizer.apply_chat_template(messages, thinking_effort=effort)
    parser = XtmlParser(tokenizer, thinking=True)
    transcript = Transcript(console)
    for token_id in chain(_tokens(engine, tuple(ids), sampling), [None]):
        for event in parser.finish() if token_id is None else parser.feed(token_id):
            if isinstance(event, ReasoningDelta):
                transcript.show({"reasoning_content": event.text})
            elif isinstance(event, ContentDelta):
                transcript.show({"content": event.text})


def _tokens(engine: Engine, ids: tuple[int, ...], sampling: Sampling) -> Iterator[int]:
    """The tokens as they come; a request that cannot run is refused before the first."""
    from k3_core.engine import Request

    return _ids(engine.submit(Request(ids, sampling)))


def _ids(events: Iterable[Event]) -> Iterator[int]:
    for event in events:
        if event.error is not None:
            raise K3Error(f"generation failed: {event.error}")
        if event.token_id is not None:
            yield event.token_id
