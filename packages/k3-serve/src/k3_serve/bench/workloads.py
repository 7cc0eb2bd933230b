"""Seeded workloads as plain data: who asks what, and when (issue: acceptance of serving).

Prompts of a given length are token ids at /v1/completions (this server, vLLM and SGLang take
them), since no text has the same length for every tokenizer. The same seed gives the same load;
nothing depends on what the server answers.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from k3_core.tasks.words import KEYS, VALUES

IDS = range(256, 1256)
"""Ids of prompts: past the bytes and before the rare words of any byte-pair vocabulary."""

SHORT_TOKENS = 200
LONG_TOKENS = 8_000
NUM_LONG = 8
BURST_AT = 10.0


@dataclass(frozen=True)
class Call:
    """One request: the route below the server's address, and its body without the model."""

    group: str
    path: str
    body: dict[str, Any]


@dataclass(frozen=True)
class Session:
    """Calls one after the other; the first at least `at` seconds after the start."""

    calls: tuple[Call, ...]
    at: float = 0.0


@dataclass(frozen=True)
class Workload:
    """Sessions, at most `concurrency` of them at a time (0: no bound, whatever the arrivals)."""

    name: str
    sessions: tuple[Session, ...]
    concurrency: int = 0

    @property
    def num_calls(self) -> int:
        """How many requests it has."""
        return sum(len(session.calls) for session in self.sessions)


def synthetic(
    seed: int,
    *,
    num_requests: int,
    prompt_tokens: int,
    output_tokens: int,
    concurrency: int = 0,
    rate: float = 0.0,
    is_poisson: bool = True,
    name: str = "synthetic",
    group: str = "all",
) -> Workload:
    """Independent requests of one size.

    With a `rate` (requests a second) they arrive by themselves, at random (Poisson) or at equal
    distances; without one the next starts when one of `concurrency` has ended. Prompts depend on
    `seed` and `name`, arrivals on `seed` alone.
    """
    times = arrivals(seed, num_requests, rate, is_poisson) if rate else [0.0] * num_requests
    rng = random.Random(f"{seed}/{name}")
    sessions = tuple(
        Session((completion(group, _ids(rng, prompt_tokens), output_tokens),), at) for at in times
    )
    return Workload(name, sessions, concurrency)


def shared_prefix(
    seed: int, *, num_prefixes: int, num_warm: int, prefix_tokens: int, new_tokens: int, output: int
) -> Workload:
    """Requests one after the other that share a prefix: `cold`, `second`, then `warm` ones.

    A cache of recurrent states knows only at the second sighting of a prefix where its users
    part: that request still computes it (serving 3b), the later ones do not.
    """
    rng = random.Random(f"{seed}/shared-prefix")
    sessions = []
    for _ in range(num_prefixes):
        prefix = _ids(rng, prefix_tokens)
        groups = ("cold", "second", *["warm"] * num_warm)
        sessions.append(
            Session(tuple(completion(g, prefix + _ids(rng, new_tokens), output) for g in groups))
        )
    return Workload("shared-prefix", tuple(sessions), concurrency=1)


def burst(
    seed: int, *, num_requests: int, rate: float, output_tokens: int, name: str, has_burst: bool
) -> Workload:
    """Short requests at random times, and with `has_burst` eight long ones all at once.

    Both variants have the same arrivals; `name` varies the prompts, so that no run finds those
    of another in a cache.
    """
    short = synthetic(
        seed,
        num_requests=num_requests,
        prompt_tokens=SHORT_TOKENS,
        output_tokens=output_tokens,
        rate=rate,
        name=name,
        group="short",
    )
    sessions = list(short.sessions)
    if has_burst:
        rng = random.Random(f"{seed}/{name}/long")
        for _ in range(NUM_LONG):
            call = completion("long", _ids(rng, LONG_TOKENS), output_tokens)
            sessions.append(Session((call,), BURST_AT))
    return Workload(name, tuple(sessions))


@dataclass
class _Trace:
    """A conversation that grows; every prompt begins with the one before it."""

    rng: random.Random
    messages: list[dict[str, Any]] = field(default_factory=list)

    def add(self, **message: Any) -> None:
        self.messages.append(message)

    def words(self, count: int) -> str:
        return " ".join(self.rng.choices(KEYS, k=count))


def agent(
    seed: int, *, num_sessions: int, num_turns: int, output_tokens: int, concurrency: int
) -> Workload:
    """Conversations in which every answer is followed by a tool's result or a new question.

    The answers in the history are the trace's own, not the server's, as in a replayed log. All
    sessions share the system message and the tools.
    """
    rng = random.Random(f"{seed}/agent")
    system = _Trace(rng).words(200)
    sessions = tuple(
        Session(
            tuple(_turns(_Trace(random.Random(rng.random())), system, num_turns, output_tokens))
        )
        for _ in range(num_sessions)
    )
    return Workload("agent", sessions, concurrency)


def _turns(trace: _Trace, system: str, num_turns: int, output_tokens: int) -> Iterator[Call]:
    trace.add(role="system", content=system)
    for turn in range(num_turns):
        if turn % 3 == 0:  # a question, two calls of tools, the next question
            trace.add(role="user", content=trace.words(40))
        yield Call(
            f"turn {turn + 1}",
            "/v1/chat/completions",
            {
                "messages": list(trace.messages),
                "tools": [LOOKUP],
                "temperature": 0,
                "max_tokens": output_tokens,
            },
        )
        if turn % 3 == 2:
            trace.add(role="assistant", content=trace.words(30))
            continue
        name = f"call_{turn}"
        arguments = json.dumps({"key": trace.words(1)})
        function = {"name": "lookup", "arguments": arguments}
        trace.add(
            role="assistant",
            content=None,
            tool_calls=[{"id": name, "type": "function", "function": function}],
        )
        values = " ".join(trace.rng.choices(VALUES, k=60))
        trace.add(role="tool", tool_call_id=name, content=values)


LOOKUP = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Looks one key up.",
        "parameters": {
            "type": "object",
            "properties": {"key": {"type": "string"}},
            "required": ["key"],
        },
    },
}


def arrivals(seed: int, count: int, rate: float, is_poisson: bool) -> list[float]:
    """Seconds after the start at which `count` requests arrive, `rate` a second."""
    rng = random.Random(f"{seed}/arrivals")
    times, now = [], 0.0
    for _ in range(count):
        now += rng.expovariate(rate) if is_poisson else 1 / rate
        times.append(now)
    return times


def completion(group: str, prompt: list[int], output_tokens: int) -> Call:
    """A greedy completion of exactly `output_tokens`, where the server knows `ignore_eos`."""
    body = {
        "prompt": prompt,
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    return Call(group, "/v1/completions", body)


def _ids(rng: random.Random, count: int) -> list[int]:
    return rng.choices(IDS, k=count)
