"""/v1/chat/completions: a request becomes engine requests, their events become chunks.

The answer that is not streamed is the fold of the chunks, so the two cannot differ (serving 4c).
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from k3_core.engine import Request
from k3_core.engine.wire import add_delta
from k3_serve.api.choice import ChatChoice
from k3_serve.api.errors import ApiError, bad_request
from k3_serve.api.fold import Chunk, fold_choices
from k3_serve.api.media import read_images
from k3_serve.api.runs import Run
from k3_serve.api.sampling import choices_of
from k3_serve.api.schemas import ChatRequest
from k3_serve.api.usage import usage_of
from k3_serve.api.validate import check_chat, check_effort
from k3_serve.limits import Limits

if TYPE_CHECKING:
    from k3_core.tokenizer import K3Tokenizer


@dataclass(frozen=True)
class Prepared:
    """A chat request as engine requests."""

    requests: list[Request]
    is_thinking: bool


def prepare(body: ChatRequest, tokenizer: K3Tokenizer, limits: Limits) -> Prepared:
    """Renders and encodes the conversation; ApiError 400 for what cannot be expressed."""
    check_chat(body, limits)
    images, prompts = read_images(body.messages, limits)
    thinking, effort = _thinking(body)
    try:
        ids = tokenizer.apply_chat_template(
            body.messages,
            tools=body.tools,
            thinking=thinking,
            thinking_effort=effort,
            tool_choice=body.tool_choice,
            response_format=body.response_format,
            image_prompts=prompts,
        )
    except ValueError as error:
        raise bad_request(str(error), "messages") from error
    max_tokens = body.max_completion_tokens
    if max_tokens is None:
        max_tokens = body.max_tokens
    samplings = choices_of(body, tokenizer, max_tokens, body.top_logprobs or 0)
    requests = [
        Request(
            token_ids=tuple(ids),
            sampling=sampling,
            images=images,
            channel="think" if thinking else "response",
            effort=effort,
        )
        for sampling in samplings
    ]
    return Prepared(requests, thinking)


def _thinking(body: ChatRequest) -> tuple[bool, str | None]:
    """Whether to think, and how hard: `thinking.effort` wins over `reasoning_effort`."""
    wanted = body.thinking
    if wanted is not None and wanted.effort is not None:
        effort, param = wanted.effort, "thinking.effort"
    else:
        effort, param = body.reasoning_effort or "max", "reasoning_effort"
    check_effort(effort, param)
    is_thinking = effort != "none" and (wanted is None or wanted.type == "enabled")
    return is_thinking, effort if is_thinking else None


async def chat_chunks(
    body: ChatRequest, prepared: Prepared, run: Run, tokenizer: K3Tokenizer
) -> AsyncIterator[Chunk]:
    """The chunks of a stream; the last one has the usage and no choices.

    Raises ApiError when a choice fails, or does not do what `tool_choice` demands.
    """
    head = {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion.chunk",
        "created": int(time.time()),
        "model": body.model,
    }
    choices = [
        ChatChoice(tokenizer, request, prepared.is_thinking, body.logprobs)
        for request in prepared.requests
    ]
    async for index, event in run.events():
        choice = choices[index]
        for part in choice.feed(event):
            yield {**head, "choices": [{"index": index, **part}]}
        if event.finish_reason is not None:
            _check_tool_choice(body.tool_choice, choice)
            yield {**head, "choices": [{"index": index, **choice.last_part()}]}
    reasoning = sum(choice.num_reasoning_tokens for choice in choices)
    completion = sum(choice.num_tokens for choice in choices)
    yield {**head, "choices": [], "usage": usage_of(run.handles[:1], completion, reasoning)}


def _check_tool_choice(wanted: Any, choice: ChatChoice) -> None:
    """The prompt asks for calls or forbids them, but nothing enforces it while generating."""
    if choice.finish_reason == "length":
        return
    if (wanted == "required") != choice.has_calls and wanted in ("required", "none"):
        did = "made none" if wanted == "required" else "made one"
        raise ApiError(
            500,
            f"tool_choice is {wanted} but the model {did}; try again or use auto",
            param="tool_choice",
            code="tool_choice_unmet",
        )


def fold_chat(chunks: Iterable[Chunk]) -> Chunk:
    """The chat.completion object that a stream of chunks amounts to."""
    result = fold_choices(chunks, lambda: {"message": {"content": None}, "logprobs": None}, _add)
    for choice in result["choices"]:
        message = choice["message"]
        if message["content"] is None and not message.get("tool_calls"):
            message["content"] = ""
    return {**result, "object": "chat.completion"}


def _add(choice: Chunk, part: Chunk) -> None:
    add_delta(choice["message"], part["delta"])
    if part.get("logprobs"):
        choice["logprobs"] = choice["logprobs"] or {"content": []}
        choice["logprobs"]["content"] += part["logprobs"]["content"]
