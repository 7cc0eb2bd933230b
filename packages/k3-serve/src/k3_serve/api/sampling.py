"""From the sampling fields of a request to the engine's `Sampling`, one per choice."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from k3_core.engine import Sampling
from k3_core.engine.protocol import MAX_SEED
from k3_serve.api.errors import bad_request

if TYPE_CHECKING:
    from k3_core.tokenizer import K3Tokenizer
    from k3_serve.api.schemas import SamplingFields


def choices_of(
    body: SamplingFields, tokenizer: K3Tokenizer, max_tokens: int | None, num_top: int
) -> list[Sampling]:
    """The sampling of each of the `n` choices; choice i of a seeded request has seed + i."""
    base = Sampling(
        max_tokens=max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        stop_ids=tuple(sorted(tokenizer.stop_ids)),
        stop=stop_strings(body),
        logit_bias=_logit_bias(body, tokenizer.vocab_size),
        top_logprobs=num_top,
    )
    return [replace(base, seed=_shift(body.seed, index)) for index in range(body.n)]


def stop_strings(body: SamplingFields) -> tuple[str, ...]:
    """The stop strings of a request, given as one or as a list."""
    return (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())


def _shift(seed: int | None, index: int) -> int | None:
    if seed is None:
        return None
    return (seed + index + MAX_SEED) % (2 * MAX_SEED) - MAX_SEED


def _logit_bias(body: SamplingFields, vocab_size: int) -> dict[int, float]:
    found: dict[int, float] = {}
    for key, bias in (body.logit_bias or {}).items():
        # The length first: thousands of digits are no integer to Python.
        token_id = int(key) if key.isdecimal() and len(key) < 20 else vocab_size
        if token_id >= vocab_size:
            allowed = f"use one of 0..{vocab_size - 1}"
            raise bad_request(
                f"logit_bias key {key[:20]!r} is no token id; {allowed}", "logit_bias"
            )
        found[token_id] = bias
    return found
