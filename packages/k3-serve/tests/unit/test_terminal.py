"""The terminal chat on the scripted engine, and the command's own errors."""

import io
import socket

import pytest
from rich.console import Console

from k3_core.errors import K3Error
from k3_serve.cli import model_name
from k3_serve.ops.run import bind
from k3_serve.terminal import Conversation, LocalBackend, talk

ANSWER = "[b]<|close|>think<|sep|><|open|>response<|sep|>{}<|close|>response<|sep|><|end_of_msg|>"


class Keyboard(Console):
    """A console with lines typed in advance."""

    def __init__(self, *lines: str) -> None:
        super().__init__(file=io.StringIO(), width=80)
        self.lines = list(lines)

    def input(self, *args: object, **kwargs: object) -> str:
        if not self.lines:
            raise EOFError
        return self.lines.pop(0)

    @property
    def shown(self) -> str:
        return self.file.getvalue()  # type: ignore[attr-defined]


@pytest.fixture
def backend(engine, tokenizer):  # type: ignore[no-untyped-def]
    with LocalBackend(engine, tokenizer) as backend:
        yield backend


def test_a_conversation_keeps_its_turns(backend, engine, script) -> None:  # type: ignore[no-untyped-def]
    engine.scripts = [script(ANSWER.format("one")), script(ANSWER.format("two"))]
    conversation = Conversation(backend.stream, {"model": "scripted"}, system="be brief")
    console = Keyboard("first", "second", "")
    talk(conversation, console)
    assert "[b]\none\n" in console.shown  # the answer does not run into its reasoning
    assert "[b]\ntwo\n" in console.shown
    roles = [message["role"] for message in conversation.messages]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    prompt = engine.tokenizer.decode(engine.requests[1].token_ids)
    assert prompt.index("be brief") < prompt.index("first") < prompt.index("second")


def test_a_refusal_is_shown_and_the_turn_forgotten(backend, engine, script) -> None:  # type: ignore[no-untyped-def]
    conversation = Conversation(backend.stream, {"model": "m", "reasoning_effort": "huge"})
    console = Keyboard("hello")
    talk(conversation, console)
    assert "'huge' is not one of" in console.shown.replace("\n", " ")
    assert conversation.messages == []


def test_bad_options_are_refused_in_process_too(backend) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(K3Error, match="temperature"):
        list(backend.stream({"model": "m", "messages": [{"role": "user"}], "temperature": -1}))


def test_a_taken_port_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(K3Error, match=rf"cannot listen on 127.0.0.1:{port}.*another --port"):
            bind("127.0.0.1", port)


def test_a_model_is_named_by_its_folder() -> None:
    assert [model_name(m) for m in ("k3-nano", "/a/b/mine/", "x/y")] == ["k3-nano", "mine", "y"]
