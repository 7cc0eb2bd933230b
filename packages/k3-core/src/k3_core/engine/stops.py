"""Stop strings: exact across token boundaries, whatever the pieces the text comes in.

A public failure of other servers is a stop string that is missed across tokens or leaks into the
stream (serving 5C rows 49, 50, 53): here the text before a stop is emitted as soon as no live
partial match can still reach it, and nothing of the stop itself ever is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from k3_core.engine.protocol import Channel, Sampling
    from k3_core.tokenizer import K3Tokenizer


class StopMatcher:
    """Passes text through up to the first stop string.

    The stop that completes first counts, and of those completing together the longest: the
    answer does not depend on how the text is cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """The text that is now known to lie before any stop; "" after a match."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        buffer = self._held + text
        hits = [(at + len(s), at, s) for s in self._stops if (at := buffer.find(s)) >= 0]
        if hits:
            _, start, self.matched = min(hits)
            self._held = ""
            return buffer[:start]
        keep = self._live_prefix(buffer)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def flush(self) -> str:
        """What was held back, when the text ended without completing a stop."""
        held, self._held = self._held, ""
        return held

    def _live_prefix(self, buffer: str) -> int:
        """Length of the longest suffix of `buffer` that begins a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for size in range(min(longest, len(buffer)), 0, -1):
            tail = buffer[-size:]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0


class StopWatch:
    """Says at which token a request's stop strings end it.

    With a channel the output is XTML and only its response text counts: a stop string inside the
    reasoning or a tool call is not a stop.
    """

    def __init__(
        self, sampling: Sampling, tokenizer: K3Tokenizer | None, channel: Channel | None
    ) -> None:
        if sampling.stop and tokenizer is None:
            raise ValueError(f"stop strings {sampling.stop} need an engine with a tokenizer")
        self._matcher: StopMatcher | None = None
        if sampling.stop and tokenizer is not None:
            self._matcher = StopMatcher(sampling.stop)
            self._text = _raw_text(tokenizer) if channel is None else _response(tokenizer, channel)

    def feed(self, token_id: int) -> bool:
        """Whether the text up to and with this token holds a stop string."""
        if self._matcher is None:
            return False
        self._matcher.feed(self._text(token_id))
        return self._matcher.matched is not None


def _raw_text(tokenizer: K3Tokenizer) -> Callable[[int], str]:
    from k3_core.tokenizer import Utf8Stream

    stream = Utf8Stream()
    return lambda token_id: stream.feed(tokenizer.token_bytes(token_id))


def _response(tokenizer: K3Tokenizer, channel: Channel) -> Callable[[int], str]:
    from k3_core.xtml.events import ContentDelta
    from k3_core.xtml.parse import XtmlParser

    parser = XtmlParser(tokenizer, thinking=channel == "think")

    def text(token_id: int) -> str:
        events = parser.feed(token_id)
        return "".join(event.text for event in events if isinstance(event, ContentDelta))

    return text
