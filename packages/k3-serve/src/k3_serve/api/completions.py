"""/v1/completions: raw text and token-id prompts, batches, echo and log-probabilities."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from k3_core.engine import Request
from k3_serve.api.errors import bad_request
from k3_serve.api.fold import Chunk, fold_choices
from k3_serve.api.profile import check_profile
from k3_serve.api.runs import Run
from k3_serve.api.sampling import choices_of, stop_strings
from k3_serve.api.schemas import CompletionRequest
from k3_serve.api.service import Service
from k3_serve.api.text_choice import Prompt, TextChoice
from k3_serve.api.usage import cache_of, usage_of

if TYPE_CHECKING:
    from k3_core.tokenizer import K3Tokenizer


def prepare(
    body: CompletionRequest, service: Service, salt: str = ""
) -> tuple[list[Prompt], list[Request]]:
    """The prompts, and the requests of prompt 0's choices, then prompt 1's, and so on.

    `salt` seeds the keys of the prefix cache. Raises ApiError 400.
    """
    tokenizer, limits = service.tokenizer, service.settings.limits
    check_profile(body, service.settings.profile)
    prompts = [_prompt(item, body.echo, tokenizer) for item in _batch(body.prompt)]
    if len(prompts) * body.n > limits.max_prompts:
        raise bad_request(
            f"{len(prompts)} prompts with n = {body.n}; at most {limits.max_prompts} texts",
            "prompt",
        )
    samplings = choices_of(body, tokenizer, body.max_tokens, body.logprobs or 0)
    if body.ignore_eos:
        samplings = [replace(sampling, stop_ids=()) for sampling in samplings]
    has_prompt_logprobs = body.echo and body.logprobs is not None
    requests = [
        Request(
            prompt.ids,
            replace(sampling, has_prompt_logprobs=has_prompt_logprobs),
            cache_salt=salt,
        )
        for prompt in prompts
        for sampling in samplings
    ]
    return prompts, requests


def _batch(prompt: str | list[Any]) -> list[str | list[int]]:
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]  # type: ignore[list-item]
    return prompt


def _prompt(item: str | list[int], has_echo: bool, tokenizer: K3Tokenizer) -> Prompt:
    ids = tokenizer.encode(item) if isinstance(item, str) else item
    try:
        # Of the ids, not the string: an echo must be valid Unicode even when the prompt is not.
        text = tokenizer.decode(ids)
    except ValueError as error:
        raise bad_request(str(error), "prompt") from error
    return Prompt(tuple(ids), text if has_echo else None)


async def completion_chunks(
    body: CompletionRequest, prompts: list[Prompt], run: Run, tokenizer: K3Tokenizer
) -> AsyncIterator[Chunk]:
    """The chunks of a stream; the last one has the usage and no choices."""
    head = {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": body.model,
    }
    has_logprobs = body.logprobs is not None
    stops = stop_strings(body)
    choices = [
        TextChoice(tokenizer, prompts[i // body.n], handle, stops, has_logprobs)
        for i, handle in enumerate(run.handles)
    ]
    async for index, events in run.events():
        for part in choices[index].feed(events):
            yield {**head, "choices": [{"index": index, **part}]}
    completion = sum(choice.num_tokens for choice in choices)
    distinct = run.handles[:: body.n]
    usage = usage_of(distinct, completion, 0)
    yield {**head, "choices": [], "usage": usage, **cache_of(distinct)}


def fold_completion(chunks: Iterable[Chunk]) -> Chunk:
    """The text_completion object that a stream of chunks amounts to."""
    return fold_choices(chunks, lambda: {"text": "", "logprobs": None}, _add)


def _add(choice: Chunk, part: Chunk) -> None:
    choice["text"] += part["text"]
    if part["logprobs"] is not None:
        before = choice["logprobs"] or {}
        choice["logprobs"] = {
            name: before.get(name, []) + items for name, items in part["logprobs"].items()
        }
