"""One choice of a chat: engine events in, parts of OpenAI chunks out (serving 4a and 4c)."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from k3_core.engine import Event, Request, StopMatcher
from k3_core.xtml import (
    ContentDelta,
    ParseEvent,
    ReasoningDelta,
    ToolArgsDelta,
    ToolCallStart,
    XtmlParser,
    joined,
)
from k3_serve.api.usage import logprob_entry

if TYPE_CHECKING:
    from k3_core.tokenizer import K3Tokenizer

Part = dict[str, Any]


class ChatChoice:
    """Parses the tokens of one choice by id and cuts its response at a stop string.

    `feed` gives parts with `finish_reason` None, the first with the role; `last_part` closes.
    """

    def __init__(self, tokenizer: K3Tokenizer, request: Request, has_logprobs: bool) -> None:
        is_thinking = request.channel == "think"
        self._tokenizer = tokenizer
        self._parser = XtmlParser(tokenizer, thinking=is_thinking)
        self._stops = StopMatcher(request.sampling.stop)
        self._logprobs: list[dict[str, Any]] | None = [] if has_logprobs else None
        self._is_started = False
        self._is_reasoning = is_thinking
        self._markers = {tokenizer.open_id, tokenizer.close_id, *tokenizer.stop_ids}
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self.has_calls = False
        self.finish_reason: str | None = None

    def feed(self, events: Sequence[Event]) -> list[Part]:
        """The parts that these events make known; after the last event nothing is held back."""
        deltas: list[Part] = []
        if not self._is_started:
            self._is_started = True
            deltas.append({"role": "assistant"})
        parsed: list[ParseEvent] = []
        for event in events:
            if event.token_id is not None:
                self._count(event)
                parsed += self._parser.feed(event.token_id)
        deltas += self._deltas(joined(parsed))
        if (reason := events[-1].finish_reason) is not None:
            deltas += self._finish(reason)
        return [self._part(delta, None) for delta in deltas]

    def last_part(self) -> Part:
        """The part with the finish reason and an empty delta."""
        return self._part({}, self.finish_reason)

    def _part(self, delta: Part, finish_reason: str | None) -> Part:
        part: Part = {"delta": delta, "finish_reason": finish_reason}
        if self._logprobs:
            # What tokens without a delta of their own left goes with the next part.
            part["logprobs"], self._logprobs = {"content": self._logprobs}, []
        return part

    def _count(self, event: Event) -> None:
        self.num_tokens += 1
        self._is_reasoning = self._is_reasoning and event.token_id not in self._markers
        self.num_reasoning_tokens += self._is_reasoning
        if self._logprobs is not None:
            self._logprobs.append(logprob_entry(self._tokenizer, event))

    def _deltas(self, parsed: Iterable[ParseEvent]) -> list[Part]:
        deltas: list[Part] = []
        for event in parsed:
            if self._stops.matched is not None:
                break
            match event:
                case ReasoningDelta(text):
                    deltas.append({"reasoning_content": text, "reasoning": text})
                case ContentDelta(text):
                    if passed := self._stops.feed(text):
                        deltas.append({"content": passed})
                case ToolCallStart(index, name):
                    self.has_calls = True
                    deltas.append(_call_start(index, name))
                case ToolArgsDelta(index, fragment):
                    function = {"arguments": fragment}
                    deltas.append({"tool_calls": [{"index": index, "function": function}]})
        return deltas

    def _finish(self, reason: str) -> list[Part]:
        deltas = self._deltas(self._parser.finish())
        if held := self._stops.flush():
            deltas.append({"content": held})
        is_turn_over = reason == "stop" and self._stops.matched is None
        self.finish_reason = "tool_calls" if self.has_calls and is_turn_over else reason
        return deltas


def _call_start(index: int, name: str) -> Part:
    function = {"name": name, "arguments": ""}
    # Unique over all turns: clients map results back by id alone.
    call_id = f"call_{uuid.uuid4().hex}"
    call = {"index": index, "id": call_id, "type": "function", "function": function}
    return {"tool_calls": [call]}
