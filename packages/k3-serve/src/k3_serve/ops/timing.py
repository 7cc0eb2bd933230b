"""The latency and outcome of engine requests, seen from their events (serving 9e)."""

from __future__ import annotations

import time
from collections.abc import Callable

from k3_core.engine import Event, Handle, Request
from k3_serve.engine.classes import classify
from k3_serve.observer import Observer


class RequestTimer:
    """Begins with a submission; reports each event and, once, how the request ended."""

    def __init__(
        self,
        observer: Observer,
        request: Request,
        handle: Handle,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._observer = observer
        name = classify(handle.num_prompt_tokens, request.request_class).name
        self._class = {"class": name}
        self._handle = handle
        self._clock = clock
        self._start = self._last = clock()
        self._num_tokens = 0
        self._is_ended = False

    def see(self, event: Event) -> None:
        """Counts one event of the request."""
        if self._is_ended:
            return
        if event.token_id is not None:
            now = self._clock()
            name = "k3_itl_seconds" if self._num_tokens else "k3_ttft_seconds"
            self._observer.observe(name, now - self._last, self._class)
            self._last = now
            self._num_tokens += 1
        if event.finish_reason is not None:
            self.end(event.finish_reason)

    def count_reasoning(self, num_tokens: int) -> None:
        """Counts generated tokens that were reasoning."""
        self._observer.count("k3_reasoning_tokens_total", num_tokens, self._class)

    def end(self, outcome: str = "abort") -> None:
        """Counts the end; without effect when the last event was seen before."""
        if self._is_ended:
            return
        self._is_ended = True
        count, labels = self._observer.count, self._class
        count("k3_requests_total", 1, {"outcome": outcome, **labels})
        count("k3_prompt_tokens_total", self._handle.num_prompt_tokens, labels)
        count("k3_generation_tokens_total", self._num_tokens, labels)
        self._observer.observe("k3_e2e_seconds", self._clock() - self._start, labels)
