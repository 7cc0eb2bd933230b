"""What generation offers to the packages above: requests, events and the `Engine` protocol.

The server and reinforcement learning use nothing else of an engine, so a faster engine replaces
this package's simple one without a change above it (report 5.3.1 and 5.4). Everything here is
plain data: this module imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch

    from k3_core.engine.suspended import Suspended

FinishReason = Literal["stop", "length", "abort", "suspended", "error"]
"""stop: a stop id or string; length: max_tokens reached; error: only this request failed."""

Channel = Literal["think", "response"]
MAX_SEED = 2**63
DEFAULT_MAX_TOKENS = 131_072
"""Longest output of a request that sets no `max_tokens` (serving 2a)."""


class Images(NamedTuple):
    """The images of one request, preprocessed (report 2.6): one row of `grid_thws` per image.

    `pixel_values` is [patches, 3, patch, patch] and `grid_thws` [images, 3] counts patches.
    """

    pixel_values: torch.Tensor
    grid_thws: torch.Tensor


class TokenLogprob(NamedTuple):
    """A token with its log-probability in nats and the likeliest alternatives, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def _require(is_valid: bool, name: str, value: object, allowed: str) -> None:
    if not is_valid:
        raise ValueError(f"{name} is {value!r}; it must be {allowed}")


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn and when a request ends.

    `temperature` 0 is greedy. `seed` None draws one at submission. Randomness depends on
    (seed, position in the sequence) only. `max_tokens` None means the rest of the context, but at
    most `DEFAULT_MAX_TOKENS`.
    `stop_ids` end the text with the id emitted; `stop` strings end it and need a tokenizer.
    `logit_bias` is added before the temperature; log-probabilities are those of the raw logits.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    top_logprobs: int = 0
    has_prompt_logprobs: bool = False

    def __post_init__(self) -> None:
        tokens, seed = self.max_tokens, self.seed
        _require(tokens is None or tokens >= 0, "max_tokens", tokens, "None or at least 0")
        _require(
            math.isfinite(self.temperature) and self.temperature >= 0,
            "temperature",
            self.temperature,
            "a finite number of at least 0",
        )
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        _require(
            seed is None or -MAX_SEED <= seed < MAX_SEED, "seed", seed, "a 64-bit signed integer"
        )
        _require(all(self.stop), "stop", self.stop, "non-empty strings")
        _require(self.top_logprobs >= 0, "top_logprobs", self.top_logprobs, "at least 0")
        for token_id, bias in self.logit_bias.items():
            _require(math.isfinite(bias), f"logit_bias[{token_id}]", bias, "finite")


class Constraint(Protocol):
    """What a grammar says about the next token of one sequence (serving 5A).

    The engine works on a `clone` of a request's constraint and feeds it every generated token, so
    that the request stays as it was and can be submitted again.
    """

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow: the request then ends with reason "stop"."""

    def allowed_mask(self, vocab_size: int) -> torch.Tensor | None:
        """Boolean [vocab_size], true where the next token may be; None when all may be."""

    def advance(self, token_id: int) -> None:
        """Takes the token that was drawn; an exception ends this request only."""

    def clone(self) -> Constraint:
        """An independent copy in the present state."""


class EngineBusy(RuntimeError):
    """The queue of a request's class is full: try again later (HTTP 429).

    `retry_after` is an estimate in seconds.
    """

    def __init__(self, message: str, request_class: str, retry_after: float) -> None:
        super().__init__(message)
        self.request_class = request_class
        self.retry_after = retry_after


@dataclass(frozen=True, eq=False)
class Request:
    """One sequence to continue.

    `token_ids` carries one media-pad id per image. `channel` says in which XTML channel the
    output starts; stop strings then apply to the response channel only. None means raw text.
    `effort`, `priority` (higher first) and `request_class` inform schedulers that use them.
    `constraint` restricts the tokens that may be drawn; log-probabilities stay those of the raw
    logits. Requests of different `cache_salt` never share a prefix cache. The first
    `num_head_tokens` are what other requests are likely to begin with too: a prefix cache keeps
    their end.
    """

    token_ids: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    images: Images | None = None
    channel: Channel | None = None
    effort: str | None = None
    priority: int = 0
    request_class: str = "default"
    constraint: Constraint | None = None
    cache_salt: str = ""
    num_head_tokens: int = 0


class Event(NamedTuple):
    """One generated token, or the end of a request that ends without one.

    `version` is the weights' version that produced the token. Exactly the last event of a
    request has a `finish_reason`; its `token_id` is None when no token came with it.
    """

    token_id: int | None
    logprob: float | None
    top_logprobs: tuple[tuple[int, float], ...]
    version: int
    finish_reason: FinishReason | None = None
    error: str | None = None


@dataclass(frozen=True)
class Completion:
    """Everything one request produced; the lists run over the generated tokens."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...]
    versions: tuple[int, ...]
    finish_reason: FinishReason
    error: str | None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None


@dataclass(frozen=True)
class Stats:
    """Counters of an engine since its start, and its present load."""

    num_waiting: int
    num_running: int
    num_finished: int
    num_failed: int
    num_prompt_tokens: int
    num_generated_tokens: int
    version: int


class Handle(Protocol):
    """The stream of one request: iterate it once, with `async for` or `for`, or `take` to its end.

    The three figures are known when the first event arrives. `num_prompt_tokens` counts the
    rows that images expand to; `num_cached_tokens` those that came from a prefix cache.
    """

    request_id: str
    num_prompt_tokens: int
    num_cached_tokens: int
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None

    def __aiter__(self) -> AsyncIterator[Event]: ...

    def __iter__(self) -> Iterator[Event]: ...

    async def take(self) -> list[Event]:
        """What has come since, one event at least; nothing once the last one was taken."""


class Engine(Protocol):
    """Continues token sequences. Every method may be called from any thread."""

    @property
    def max_length(self) -> int:
        """The longest sequence, prompt and output together, in tokens."""

    def submit(self, request: Request) -> Handle:
        """Queues a request without blocking.

        Raises ValueError when it can never run, EngineBusy when it cannot be queued now.
        """

    def generate(self, requests: list[Request]) -> list[Completion]:
        """Runs requests to their end, in the order given."""

    def abort(self, handle: Handle) -> None:
        """Ends a request soon with reason "abort"; one that has ended stays as it is."""

    def suspend(self, handle: Handle) -> Suspended:
        """Takes a request out after the running step; ValueError when it has ended.

        The handle ends with reason "suspended"; `resume` continues with the next token.
        """

    def resume(self, suspended: Suspended) -> Handle:
        """Continues a suspended request; the new handle yields the tokens that follow."""

    def update_weights(
        self,
        named_tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
        version: int,
    ) -> None:
        """Replaces weights by checkpoint name between two steps; later events carry `version`.

        Requests in flight continue as if their tokens so far were a prompt to the new weights.
        """

    def stats(self) -> Stats:
        """The counters now; they may lag the events by the running step."""

    def close(self) -> None:
        """Ends every request with reason "abort" and frees the engine."""
