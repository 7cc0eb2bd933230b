"""One choice of a raw completion: engine events in, parts of text_completion chunks out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from k3_core.engine import Event, Handle, StopMatcher, TokenLogprob
from k3_core.tokenizer import Utf8Stream
from k3_serve.api.usage import LOWEST, spelling

if TYPE_CHECKING:
    from k3_core.tokenizer import K3Tokenizer

Part = dict[str, Any]


@dataclass(frozen=True)
class Prompt:
    """One prompt of a batch: its ids, and its text when the request echoes it."""

    ids: tuple[int, ...]
    echo: str | None


class Logprobs:
    """The four parallel lists of the protocol, collected until the next part takes them."""

    def __init__(self, tokenizer: K3Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = Utf8Stream()
        self._offset = 0
        self._clear()

    def add(self, token_id: int, scored: TokenLogprob | None) -> None:
        """Appends a token; the first of an echoed prompt has no score."""
        data = spelling(self._tokenizer, token_id)
        name = data.decode("utf-8", "replace")
        self._lists["tokens"].append(name)
        self._lists["token_logprobs"].append(
            None if scored is None else max(scored.logprob, LOWEST)
        )
        self._lists["top_logprobs"].append(None if scored is None else self._top(scored, name))
        self._lists["text_offset"].append(self._offset)
        self._offset += len(self._utf8.feed(data))

    def take(self) -> dict[str, list[Any]]:
        """What was added since the last call."""
        lists = self._lists
        self._clear()
        return lists

    def _clear(self) -> None:
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        self._lists: dict[str, list[Any]] = {name: [] for name in names}

    def _top(self, scored: TokenLogprob, name: str) -> dict[str, float]:
        """The likeliest tokens by spelling (the better one of equal spelling), and this one."""
        top: dict[str, float] = {}
        for token_id, logprob in scored.top:
            spelled = spelling(self._tokenizer, token_id).decode("utf-8", "replace")
            top.setdefault(spelled, max(logprob, LOWEST))
        top.setdefault(name, max(scored.logprob, LOWEST))
        return top


class TextChoice:
    """Decodes the tokens of one choice and cuts the text at a stop string.

    With an echo the prompt's text, and its log-probabilities, come first. A stop token adds no
    text.
    """

    def __init__(
        self,
        tokenizer: K3Tokenizer,
        prompt: Prompt,
        handle: Handle,
        stops: tuple[str, ...],
        has_logprobs: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._handle = handle
        self._utf8 = Utf8Stream()
        self._stops = StopMatcher(stops)
        self._logprobs = Logprobs(tokenizer) if has_logprobs else None
        self._is_started = False
        self.num_tokens = 0

    def feed(self, events: Sequence[Event]) -> list[Part]:
        """The parts that these events make known; the last has the finish reason and no text."""
        parts: list[Part] = []
        if not self._is_started:
            self._is_started = True
            if self._prompt.echo is not None:
                parts.append(self._echo(self._prompt.echo))
        text = "".join(self._token(event.token_id, event) for event in events)
        reason = events[-1].finish_reason
        if reason is not None:
            text += self._stops.feed(self._utf8.flush()) + self._stops.flush()
        if text:
            parts.append(self._part(text, None))
        if reason is not None:
            parts.append(self._part("", reason))
        return parts

    def _echo(self, text: str) -> Part:
        if self._logprobs is not None:
            scores = self._handle.prompt_logprobs or ()
            for token_id, scored in zip(self._prompt.ids, scores, strict=True):
                self._logprobs.add(token_id, scored)
        return self._part(text, None)

    def _token(self, token_id: int | None, event: Event) -> str:
        if token_id is None or event.logprob is None:
            return ""
        self.num_tokens += 1
        if self._logprobs is not None:
            scored = TokenLogprob(token_id, event.logprob, event.top_logprobs)
            self._logprobs.add(token_id, scored)
        if token_id in self._tokenizer.stop_ids:
            return ""
        return self._stops.feed(self._utf8.feed(spelling(self._tokenizer, token_id)))

    def _part(self, text: str, finish_reason: str | None) -> Part:
        logprobs = None if self._logprobs is None else self._logprobs.take()
        return {"text": text, "logprobs": logprobs, "finish_reason": finish_reason}
