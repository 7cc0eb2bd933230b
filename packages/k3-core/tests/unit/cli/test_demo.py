"""`k3 demo` without a model: which questions it draws, and how it judges an answer."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest
from rich.console import Console

from k3_core.cli import demo
from k3_core.cli.lazy import CommandRegistry
from k3_core.errors import K3Error
from k3_core.tasks import EFFORTS, FAMILIES


class ScriptedClient:
    """Answers each request with the next list of (delta, finish reason)."""

    def __init__(self, *answers: list) -> None:
        self.answers = list(answers)
        self.bodies: list[dict] = []

    def stream(self, body: dict):  # type: ignore[no-untyped-def]
        self.bodies.append(json.loads(json.dumps(body)))
        for delta, reason in self.answers.pop(0):
            yield {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}


def said(text: str, reason: str = "stop") -> list:
    half = len(text) // 2
    pieces = [{"role": "assistant"}, {"content": text[:half]}, {"content": text[half:]}]
    return [*((piece, None) for piece in pieces), ({}, reason)]


def called(name: str, arguments: str) -> list:
    function = {"name": name, "arguments": ""}
    call = {"index": 0, "id": "call_9", "type": "function", "function": function}
    pieces = [{"index": 0, "function": {"arguments": piece}} for piece in arguments]
    calls = [call, *pieces]
    return [*(({"tool_calls": [piece]}, None) for piece in calls), ({}, "tool_calls")]


def asked(question, *answers: list):  # type: ignore[no-untyped-def]
    client, console = ScriptedClient(*answers), Console(file=io.StringIO(), width=100)
    is_right = demo.ask(client, "m", question, "low", console)  # type: ignore[arg-type]
    return is_right, client, console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("seed", range(8))
def test_ten_different_held_out_questions_of_every_family(seed: int) -> None:
    drawn = demo.draw_questions(seed)
    counts = Counter(question.family for question, _ in drawn)
    assert len({(q.family, q.key) for q, _ in drawn}) == 10
    assert set(counts) == set(FAMILIES)
    assert min(counts.values()) >= 2
    assert {question.split for question, _ in drawn} == {"test"}
    assert {effort for _, effort in drawn} == set(EFFORTS)
    again = demo.draw_questions(seed)
    assert [question.prompt for question, _ in again] == [question.prompt for question, _ in drawn]


def questions_of(family: str):  # type: ignore[no-untyped-def]
    return next(q for q, _ in demo.draw_questions(3) if q.family == family)


@pytest.mark.parametrize("family", ["sum", "sort", "lookup"])
def test_only_a_finished_right_answer_counts(family: str) -> None:
    question = questions_of(family)
    assert asked(question, said(question.answer))[0]
    assert not asked(question, said(f"{question.answer} or so"))[0]
    assert not asked(question, said(question.answer, "length"))[0]
    assert question.answer in asked(question, said(question.answer))[2]


def test_a_tool_round_trip_sends_the_result_back() -> None:
    question = questions_of("tool_lookup")
    function = question.reference_turn("low")[0]["tool_calls"][0]["function"]
    call = called(function["name"], json.dumps(function["arguments"]))
    is_right, client, shown = asked(question, call, said(question.answer))
    assert is_right
    assert f"tool: {question.answer}" in shown
    first, second = client.bodies
    assert first["tools"] == second["tools"] == question.tools
    assert second["messages"][-2]["tool_calls"][0]["id"] == "call_9"
    assert second["messages"][-1] == {
        "role": "tool",
        "tool_call_id": "call_9",
        "content": question.answer,
    }


def test_a_tool_question_answered_without_the_tool_is_wrong() -> None:
    question = questions_of("tool_lookup")
    assert not asked(question, said(question.answer))[0]
    wrong_call = called("other", "{}")
    _, client, shown = asked(question, wrong_call, said("?"))
    assert "tool: not found" in shown
    assert client.bodies[1]["messages"][-1]["content"] == "not found"


def test_without_the_server_package_the_error_says_what_to_install(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(CommandRegistry, "get", lambda self, name: None)
    with pytest.raises(K3Error, match="pip install k3-serve"), demo.running_server("k3-nano"):
        pass


def test_a_server_that_fails_is_quoted() -> None:
    message = "(?s)ended before it answered; it said:.*no-such-model"
    with pytest.raises(K3Error, match=message), demo.running_server("no-such-model"):
        pass


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_server_too(monkeypatch, number: int) -> None:  # type: ignore[no-untyped-def]
    start, started = subprocess.Popen, []

    def sleeper(command, **streams):  # type: ignore[no-untyped-def]
        started.append(start([sys.executable, "-c", "import time; time.sleep(60)"], **streams))
        return started[0]

    monkeypatch.setattr(demo.subprocess, "Popen", sleeper)
    monkeypatch.setattr(demo.ChatClient, "wait_until_healthy", lambda self, *_: None)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises((SystemExit, KeyboardInterrupt)), demo.running_server("k3-nano"):
        os.kill(os.getpid(), number)
        time.sleep(10)
    assert started[0].poll() is not None
    assert signal.getsignal(signal.SIGTERM) == before
