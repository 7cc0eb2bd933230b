"""An engine that says what it is told: for exact tests of parsing, streams, stops, usage and ends.

It follows the rules of the protocol where a test should not have to: stop ids and strings,
`max_tokens`, constraints, aborting, suspending. A tokenizer is all that it needs, no model.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, repeat
from typing import TYPE_CHECKING

from k3_core.engine import (
    Completion,
    Event,
    EventStream,
    FinishReason,
    Handle,
    Request,
    Stats,
    Suspended,
    TokenLogprob,
    fold_events,
)
from k3_core.engine.stops import StopWatch

if TYPE_CHECKING:
    import torch

    from k3_core.tokenizer import K3Tokenizer

LOGPROB = -0.5
"""Of every token without a scripted one, in nats; the i-th alternative has i less."""


@dataclass(frozen=True)
class Script:
    """The answer to one request.

    tokens: the ids, unless a stop, `max_tokens` or the constraint ends it before.
    spans: how many come at a time, the last number repeating; (1,) one by one as decode steps
    give them, (4, 1, 3) as accepted drafts do. Empty: all at once, before anybody listens.
    delay: seconds before each span. logprobs: of the first tokens, in nats.
    finish: how it ends after its last token; `error` ends it with that message instead, and with
    `holds` it stands still until it is aborted.
    num_cached, cache_report: what a prefix cache is said to have done.
    """

    tokens: Sequence[int] = ()
    spans: tuple[int, ...] = ()
    delay: float = 0.0
    logprobs: tuple[float, ...] = ()
    finish: FinishReason = "length"
    error: str | None = None
    holds: bool = False
    num_cached: int = 0
    cache_report: Mapping[str, float | str] | None = None

    def spans_of(self, events: Sequence[Event]) -> Iterator[list[Event]]:
        """The events in the groups in which they arrive."""
        rest = iter(events)
        sizes = chain(self.spans, repeat(self.spans[-1])) if self.spans else iter([len(events)])
        for size in sizes:
            if not (span := list(islice(rest, size))):
                return
            yield span


class ScriptedStream(EventStream):
    """A handle that gets its next span when the consumer has taken the one before."""

    def __init__(self, request_id: str, request: Request, script: Script) -> None:
        super().__init__(request_id, len(request.token_ids))
        self.request, self.script = request, script
        self.given: list[int] = []
        self.is_ended = False
        self._spans: Iterator[list[Event]] = iter(())

    def play(self, events: Sequence[Event]) -> None:
        """Delivers these events as the script says."""
        self._spans = self.script.spans_of(events)
        if not self.script.spans and not self.script.delay:
            self._put_span()

    def put(self, event: Event) -> None:
        """Adds an event; nothing comes after the end."""
        if self.is_ended:
            return
        self.is_ended = event.finish_reason is not None
        if event.token_id is not None:
            self.given.append(event.token_id)
        super().put(event)

    def _put_span(self) -> None:
        for event in next(self._spans, ()):
            self.put(event)

    async def _arrival(self) -> None:
        if not self._events and not self.is_ended:
            await asyncio.sleep(self.script.delay)
            self._put_span()
        await super()._arrival()

    def __next__(self) -> Event:
        if not self._events and not self.is_ended:
            time.sleep(self.script.delay)
            self._put_span()
        return super().__next__()


class ScriptedEngine:
    """Answers request i with script i (the last one repeats), by the rules of the protocol.

    `scripts` may be set at any time; a plain list of ids is a `Script` of them. `requests` are
    those submitted, `aborted` the ids of the handles that were aborted.
    """

    max_length = 4096

    def __init__(
        self, tokenizer: K3Tokenizer, scripts: Sequence[Script | Sequence[int]] = ((),)
    ) -> None:
        self.tokenizer = tokenizer
        self.scripts = scripts
        self.requests: list[Request] = []
        self.aborted: list[str] = []
        self.version = 0
        self._streams: list[ScriptedStream] = []

    def submit(self, request: Request) -> EventStream:
        """The handle; ValueError as an engine raises it for what can never run."""
        if len(request.token_ids) + (request.sampling.max_tokens or 0) > self.max_length:
            raise ValueError(f"the request exceeds the context of {self.max_length} tokens")
        if any(not 0 <= i < self.tokenizer.vocab_size for i in request.sampling.logit_bias):
            raise ValueError("a logit_bias id is outside the vocabulary")
        script = self.scripts[min(len(self.requests), len(self.scripts) - 1)]
        self.requests.append(request)
        return self._play(request, script if isinstance(script, Script) else Script(script))

    def _play(self, request: Request, script: Script, generated: Sequence[int] = ()) -> EventStream:
        """A new stream of the script's tokens after the `generated` ones."""
        stream = ScriptedStream(f"request-{len(self._streams)}", request, script)
        self._streams.append(stream)
        stream.num_cached_tokens = script.num_cached
        stream.cache_report.update(script.cache_report or {})
        if request.sampling.has_prompt_logprobs:
            scored = [TokenLogprob(i, LOGPROB, ((i, LOGPROB),)) for i in request.token_ids]
            stream.prompt_logprobs = (None, *scored[1:])
        events = list(self._events(request, script))
        stream.play(events[len(generated) :])
        return stream

    def _events(self, request: Request, script: Script) -> Iterator[Event]:
        """All that the script comes to for this request."""
        sampling = request.sampling
        watch = StopWatch(sampling, self.tokenizer, request.channel)
        constraint = request.constraint and request.constraint.clone()
        num_tokens = len(script.tokens)
        limit = num_tokens + 1 if sampling.max_tokens is None else sampling.max_tokens
        goes_on = script.holds or script.error is not None
        for count, token_id in enumerate(script.tokens[:limit], 1):
            if constraint is not None:
                mask_V = constraint.allowed_mask(self.tokenizer.vocab_size)
                if mask_V is not None and not mask_V[token_id]:
                    yield self._end("error", f"token {count} of the script is not allowed")
                    return
                constraint.advance(token_id)
            reason: FinishReason | None = None
            if token_id in sampling.stop_ids or watch.feed(token_id):
                reason = "stop"
            elif count == limit:
                reason = "length"
            elif count == num_tokens and not goes_on:
                reason = script.finish
            scores = script.logprobs[count - 1 : count]
            logprob = scores[0] if scores else LOGPROB
            top = tuple((token_id + i, logprob - i) for i in range(sampling.top_logprobs))
            yield Event(token_id, logprob, top, self.version, reason)
            if reason is not None:
                return
        if script.error is not None:
            yield self._end("error", script.error)
        elif not script.holds:
            yield self._end(script.finish)

    def _end(self, reason: FinishReason, error: str | None = None) -> Event:
        return Event(None, None, (), self.version, reason, error)

    def abort(self, handle: Handle) -> None:
        """Ends the request with reason "abort" unless it has ended; noted in any case."""
        self.aborted.append(handle.request_id)
        self._stream(handle).put(self._end("abort"))

    def suspend(self, handle: Handle) -> Suspended:
        """Takes a request out; what was delivered counts as generated."""
        stream = self._stream(handle)
        if stream.is_ended:
            raise ValueError(f"{handle.request_id} has ended; only a running one is suspended")
        stream.put(self._end("suspended"))
        return Suspended(stream.request, tuple(stream.given))

    def resume(self, suspended: Suspended) -> EventStream:
        """Continues with the script that it had."""
        stream = next(s for s in self._streams if s.request is suspended.request)
        return self._play(suspended.request, stream.script, suspended.generated)

    def _stream(self, handle: Handle) -> ScriptedStream:
        return next(s for s in self._streams if s is handle)

    def update_weights(
        self,
        named_tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
        version: int,
    ) -> None:
        """Notes the version, which requests from now on carry."""
        self.version = version

    def stats(self) -> Stats:
        """How many have not ended; the tokens that were delivered."""
        ended = sum(stream.is_ended for stream in self._streams)
        prompt = sum(len(request.token_ids) for request in self.requests)
        given = sum(len(stream.given) for stream in self._streams)
        return Stats(0, len(self._streams) - ended, ended, 0, prompt, given, self.version)

    def generate(self, requests: list[Request]) -> list[Completion]:
        """Runs requests to their end, one after the other."""
        handles = [self.submit(request) for request in requests]
        return [fold_events(list(handle), handle.prompt_logprobs) for handle in handles]

    def close(self) -> None:
        """Aborts what has not ended."""
        for stream in self._streams:
            stream.put(self._end("abort"))
