"""The terminal chat: streams an answer, its reasoning dimmed, and keeps the conversation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from k3_core.cli.transcript import Transcript
from k3_core.engine import Engine
from k3_core.engine.wire import add_delta
from k3_core.errors import K3Error

if TYPE_CHECKING:
    from k3_core.tokenizer import K3Tokenizer

Stream = Callable[[dict[str, Any]], Iterator[dict[str, Any]]]


class Conversation:
    """The messages so far, and the request options that stay the same."""

    def __init__(self, stream: Stream, options: dict[str, Any], system: str = "") -> None:
        self._stream = stream
        self._options = options
        self.messages: list[dict[str, Any]] = []
        if system:
            self.messages.append({"role": "system", "content": system})

    def ask(self, text: str) -> Iterator[dict[str, Any]]:
        """The deltas of the answer to `text`; both become part of the conversation."""
        turn = {"role": "user", "content": text}
        answer: dict[str, Any] = {"role": "assistant", "content": ""}
        for chunk in self._stream({**self._options, "messages": [*self.messages, turn]}):
            for choice in chunk["choices"]:
                add_delta(answer, choice["delta"])
                yield choice["delta"]
        self.messages += [turn, answer]


class LocalBackend:
    """Answers in this process by the server's own code, without HTTP."""

    def __init__(self, engine: Engine, tokenizer: K3Tokenizer) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._runner = asyncio.Runner()

    def __enter__(self) -> LocalBackend:
        return self

    def __exit__(self, *exc: object) -> None:
        self._runner.close()

    def stream(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The chunks of a chat request; K3Error for what the server would refuse."""
        from pydantic import ValidationError

        from k3_serve.api import chat
        from k3_serve.api.errors import ApiError
        from k3_serve.api.schemas import ChatRequest
        from k3_serve.api.service import Service

        try:
            request = ChatRequest.model_validate(body)
            service = Service(self._engine, self._tokenizer, request.model)
            prepared = chat.prepare(request, service)
            run = service.run(prepared.requests, "messages")
            chunks = chat.chat_chunks(request, prepared, run, service)
            while (chunk := self._runner.run(_next(chunks))) is not None:
                yield chunk
        except (ApiError, ValidationError) as error:
            raise K3Error(str(error)) from error


async def _next(chunks: Any) -> dict[str, Any] | None:
    return await anext(chunks, None)


def talk(conversation: Conversation, console: Console | None = None) -> None:
    """Reads lines and shows answers until an empty line or the end of input."""
    console = console or Console(highlight=False)
    console.print("Type a message; an empty line ends.", style="dim")
    while text := _read(console):
        try:
            transcript = Transcript(console)
            for delta in conversation.ask(text):
                transcript.show(delta)
        except K3Error as error:
            console.print(f"\n[red]{escape(str(error))}[/]", end="")
        except KeyboardInterrupt:
            console.print("\n(stopped)", style="dim", end="")
        console.print()


def _read(console: Console) -> str:
    try:
        return console.input("[bold]> [/]").strip()
    except (EOFError, KeyboardInterrupt):
        return ""
