"""Token counts and log-probabilities in the wire's shape."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from k3_core.engine import Event, Handle

if TYPE_CHECKING:
    from k3_core.tokenizer import K3Tokenizer

LOWEST = -9999.0  # JSON has no infinity


def usage_of(prompts: Iterable[Handle], completion: int, reasoning: int) -> dict[str, Any]:
    """The usage object; `prompts` has one handle per distinct prompt."""
    handles = list(prompts)
    prompt = sum(handle.num_prompt_tokens for handle in handles)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(h.num_cached_tokens for h in handles)},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }


def cache_of(prompts: Iterable[Handle]) -> dict[str, Any]:
    """`k3_cache` of a response, summed over its prompts: what the prefix cache did (serving 9e).

    mla_match: tokens whose latents were cached; state_hit: those that were reused, which have a
    state too. After a restore: restored_tokens, those that a tier added to the hit; its bytes,
    milliseconds and the tier. Nothing for an engine without such a cache.
    """
    total: dict[str, Any] = {}
    for handle in prompts:
        for name, value in getattr(handle, "cache_report", {}).items():
            if isinstance(value, str):
                total[name] = ", ".join(sorted({value, *filter(None, [total.get(name)])}))
            else:
                total[name] = total.get(name, 0) + value
    return {"k3_cache": total} if total else {}


def spelling(tokenizer: K3Tokenizer, token_id: int) -> bytes:
    """The bytes of a token; none for an id that the vocabulary leaves unused."""
    try:
        return tokenizer.token_bytes(token_id)
    except ValueError:
        return b""


def logprob_entry(tokenizer: K3Tokenizer, event: Event) -> dict[str, Any]:
    """One element of `logprobs.content`, the top alternatives included."""
    assert event.token_id is not None and event.logprob is not None
    top = [_entry(tokenizer, token_id, value) for token_id, value in event.top_logprobs]
    return {**_entry(tokenizer, event.token_id, event.logprob), "top_logprobs": top}


def _entry(tokenizer: K3Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    data = spelling(tokenizer, token_id)
    return {
        "token": data.decode("utf-8", "replace"),
        "logprob": max(logprob, LOWEST),
        "bytes": list(data),
    }
