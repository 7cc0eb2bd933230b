"""One request inside the simple engine: its ids, its place in the cache, its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from k3_core.engine.handle import EventStream
from k3_core.engine.protocol import Event, FinishReason, Request, TokenLogprob
from k3_core.engine.stops import StopWatch
from k3_core.engine.suspended import Suspended

if TYPE_CHECKING:
    import torch

    from k3_core.tokenizer import K3Tokenizer

UNPLACED = -1


class Sequence:
    """Mutable state of a request; only the engine's thread touches it after submission."""

    def __init__(
        self,
        handle: EventStream,
        suspended: Suspended,
        max_tokens: int,
        tokenizer: K3Tokenizer | None,
    ) -> None:
        self.handle = handle
        self.request: Request = suspended.request
        self.ids = [*self.request.token_ids, *suspended.generated]
        self.max_tokens = max_tokens
        self.slot = UNPLACED
        self.embeds_TD: torch.Tensor | None = None
        self.num_fed = 0
        self.is_prefilled = False
        self.is_ended = False
        self.has_failed = False
        self.prompt_logprobs: list[TokenLogprob | None] = []
        self._stop_watch = StopWatch(self.request.sampling, tokenizer, self.request.channel)
        constraint = self.request.constraint
        self._constraint = None if constraint is None else constraint.clone()
        for token_id in suspended.generated:
            self._stop_watch.feed(token_id)
            if self._constraint is not None:
                self._constraint.advance(token_id)

    @property
    def num_generated(self) -> int:
        return len(self.ids) - len(self.request.token_ids)

    @property
    def needs_prompt_logprobs(self) -> bool:
        return self.request.sampling.has_prompt_logprobs and self.num_generated == 0

    @property
    def num_rows(self) -> int:
        """Rows of the prefill: the ids, or what they expand to with images."""
        return len(self.ids) if self.embeds_TD is None else len(self.embeds_TD)

    def forget_cache(self) -> None:
        """Back to the state before the prefill, which then covers all ids so far."""
        self.num_fed = 0
        self.is_prefilled = False
        self.prompt_logprobs = []

    def end_prefill(self) -> None:
        """The cache holds the prompt; its log-probabilities become visible on the handle."""
        self.is_prefilled = True
        self.embeds_TD = None
        if self.needs_prompt_logprobs:
            self.handle.prompt_logprobs = (None, *self.prompt_logprobs)

    def allowed_mask(self, vocab_size: int) -> torch.Tensor | None:
        """Which tokens may come next, boolean [V]; ValueError when none may or V is another."""
        if self._constraint is None:
            return None
        mask_V = self._constraint.allowed_mask(vocab_size)
        if mask_V is not None and mask_V.shape != (vocab_size,):
            raise ValueError(f"the constraint's mask is {list(mask_V.shape)}, not [{vocab_size}]")
        if mask_V is not None and not mask_V.any():
            raise ValueError("the constraint allows no token; it should have been complete")
        return mask_V

    def emit(self, token: TokenLogprob, version: int) -> None:
        """Appends a token and tells the consumer, ending the sequence where it must end."""
        token_id = token.token_id
        self.ids.append(token_id)
        is_complete = False
        if self._constraint is not None:
            self._constraint.advance(token_id)
            is_complete = self._constraint.is_complete
        reason: FinishReason | None = None
        is_stop = token_id in self.request.sampling.stop_ids or self._stop_watch.feed(token_id)
        if is_stop or is_complete:
            reason = "stop"
        elif self.num_generated >= self.max_tokens:
            reason = "length"
        self._put(Event(token_id, token.logprob, token.top, version, reason))

    def end(self, reason: FinishReason, version: int, error: str | None = None) -> None:
        """Ends the sequence without a token."""
        self._put(Event(None, None, (), version, reason, error))

    def suspended(self) -> Suspended:
        """The state to continue from."""
        return Suspended(self.request, tuple(self.ids[len(self.request.token_ids) :]))

    def _put(self, event: Event) -> None:
        self.is_ended = event.finish_reason is not None
        self.has_failed = event.finish_reason == "error"
        self.handle.put(event)
