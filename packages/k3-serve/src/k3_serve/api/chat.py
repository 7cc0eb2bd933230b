"""/v1/chat/completions: a request becomes engine requests, their events become chunks.

The answer that is not streamed is the fold of the chunks, so the two cannot differ (serving 4c).
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from k3_core.engine import Images, Request
from k3_core.engine.wire import add_delta
from k3_serve.api.choice import ChatChoice
from k3_serve.api.enforce import constraint_of
from k3_serve.api.errors import bad_request
from k3_serve.api.fold import Chunk, fold_choices
from k3_serve.api.media import fetch_images, read_images
from k3_serve.api.partial import Prefix, prefix_of
from k3_serve.api.profile import check_profile
from k3_serve.api.runs import Run
from k3_serve.api.sampling import choices_of
from k3_serve.api.schemas import ChatRequest
from k3_serve.api.service import Service
from k3_serve.api.usage import cache_of, usage_of
from k3_serve.api.validate import check_chat, check_effort


@dataclass(frozen=True)
class Prompt:
    """A rendered conversation. The output begins in `channel`.

    The first `num_head` ids are its stable head: tools, effort and the first system message.
    """

    ids: list[int]
    num_head: int
    channel: Literal["think", "response"]
    effort: str | None
    images: Images | None
    prefix: Prefix | None


@dataclass(frozen=True)
class Prepared:
    """A chat request as engine requests, one a choice."""

    requests: list[Request]


async def prepare_async(body: ChatRequest, service: Service, salt: str) -> Prepared:
    """`prepare` beside the event loop, after the fetching of remote images."""
    files = await fetch_images(body.messages, service.settings, service.observer)
    return await asyncio.to_thread(prepare, body, service, salt, files)


def prepare(
    body: ChatRequest, service: Service, salt: str = "", files: Mapping[str, bytes] | None = None
) -> Prepared:
    """Renders and encodes the conversation, and compiles the grammar of its answer.

    `files` are remote images by address. Raises ApiError 400 for what cannot be expressed.
    """
    prompt = render(body, service, files)
    max_tokens = body.max_completion_tokens
    if max_tokens is None:
        max_tokens = body.max_tokens
    samplings = choices_of(body, service.tokenizer, max_tokens, body.top_logprobs or 0)
    constraint = constraint_of(body, prompt.channel, prompt.prefix, service)
    requests = [
        Request(
            token_ids=tuple(prompt.ids),
            sampling=sampling,
            images=prompt.images,
            channel=prompt.channel,
            effort=prompt.effort,
            constraint=constraint,
            cache_salt=salt,
            num_head_tokens=prompt.num_head,
        )
        for sampling in samplings
    ]
    return Prepared(requests)


def render(body: ChatRequest, service: Service, files: Mapping[str, bytes] | None = None) -> Prompt:
    """The prompt of a checked conversation; ApiError 400 for one that cannot be expressed."""
    limits = service.settings.limits
    check_profile(body, service.settings.profile)
    check_chat(body, limits)
    thinking, effort = _thinking(body)
    prefix = prefix_of(body.messages, thinking)
    messages = body.messages if prefix is None else body.messages[:-1]
    images, image_prompts = read_images(messages, limits, files or {}, service.observer)
    # The prompt has no wording for a named tool; the grammar sees to the name.
    choice = "required" if isinstance(body.tool_choice, dict) else body.tool_choice
    try:
        segments = service.tokenizer.chat_segments(
            messages,
            tools=body.tools,
            thinking=thinking,
            thinking_effort=effort,
            tool_choice=choice,
            response_format=body.response_format,
            image_prompts=image_prompts,
        )
    except ValueError as error:
        raise bad_request(str(error), "messages") from error
    channel: Literal["think", "response"] = "think" if thinking else "response"
    if prefix is not None:
        segments, channel = segments + prefix.segments, prefix.channel
    head = service.tokenizer.chat_segments(
        [one for one in messages[:1] if one["role"] == "system"],
        tools=body.tools,
        thinking=thinking,
        thinking_effort=effort,
        add_generation_prompt=False,
    )
    size = len(head) if segments[: len(head)] == head else 0  # an image in it is not in `head`
    first, rest = segments[:size], segments[size:]
    ids = service.tokenizer.encode_segments(first)
    num_head = len(ids)
    ids += service.tokenizer.encode_segments(rest)
    return Prompt(ids, num_head, channel, effort, images, prefix)


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
    body: ChatRequest, prepared: Prepared, run: Run, service: Service
) -> AsyncIterator[Chunk]:
    """The chunks of a stream; the last one has the usage and no choices.

    Raises ApiError when a choice fails.
    """
    head = {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion.chunk",
        "created": int(time.time()),
        "model": body.model,
    }
    choices = [
        ChatChoice(service.tokenizer, request, body.logprobs) for request in prepared.requests
    ]
    has_own_usage = service.settings.profile == "kimi"
    async for index, events in run.events():
        choice = choices[index]
        for part in choice.feed(events):
            yield {**head, "choices": [{"index": index, **part}]}
        if events[-1].finish_reason is not None:
            last = choice.last_part()
            if has_own_usage and body.stream:
                counts = choice.num_tokens, choice.num_reasoning_tokens
                last["usage"] = usage_of([run.handles[index]], *counts)
            yield {**head, "choices": [{"index": index, **last}]}
    reasoning = sum(choice.num_reasoning_tokens for choice in choices)
    run.count_reasoning(reasoning)
    completion = sum(choice.num_tokens for choice in choices)
    usage = usage_of(run.handles[:1], completion, reasoning)
    yield {**head, "choices": [], "usage": usage, **cache_of(run.handles[:1])}


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
