"""Conversation -> XTML segments (report 8.1, architecture 8).

Order: tool declaration, thinking effort, messages, tool choice, response format, generation
prefix. A conversation is rendered as blocks, which know whether the model has to generate them;
flattened they are the prompt, and `k3_core.xtml.training` reads the loss mask off them.
"""

from collections.abc import Iterator
from itertools import groupby
from typing import Any, NamedTuple

from k3_core.xtml import options
from k3_core.xtml.calls import Call, call_segments, order_results, read_calls
from k3_core.xtml.content import ImagePrompts, content_segments
from k3_core.xtml.json_text import ConversationError
from k3_core.xtml.segments import END_OF_MSG, Segment, closer, message, opener, plain

ROLES = ("system", "user", "assistant", "tool")


class Block(NamedTuple):
    """Consecutive segments of one kind: `is_target` when the model has to generate them."""

    segments: list[Segment]
    is_target: bool


def chat_segments(
    messages: list[dict[str, Any]],
    *,
    tools: list[dict[str, Any]] | None = None,
    thinking: bool = True,
    thinking_effort: str | None = "max",
    tool_choice: str | None = None,
    response_format: dict[str, Any] | None = None,
    image_prompts: list[str] | None = None,
    add_generation_prompt: bool = True,
) -> list[Segment]:
    """The conversation as `(text, is_control)` pairs, each to be encoded on its own.

    Without `thinking` the think channels and the effort message are left out. Image parts become
    the prebuilt `image_prompts` in order, or placeholders when there are none.
    Raises ConversationError, naming the message, for what XTML cannot express: an unknown role,
    effort, tool choice or response format, arguments that are JSON but no object, a tool result
    of no known tool, tools declared twice or beside content, image prompts not one per image.
    """
    images = ImagePrompts(image_prompts)
    blocks = conversation_blocks(messages, tools, thinking, thinking_effort, images)
    segments = [segment for block in blocks for segment in block.segments]
    images.check()
    segments += options.tool_choice(tool_choice)
    segments += options.response_format(response_format)
    return segments + (generation_prefix(thinking) if add_generation_prompt else [])


def generation_prefix(thinking: bool) -> list[Segment]:
    """What every assistant message begins with; the model's output continues after it."""
    start = opener("message", {"role": "assistant"})
    return start + opener("think" if thinking else "response")


def conversation_blocks(
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    thinking: bool,
    thinking_effort: str | None,
    images: ImagePrompts,
) -> Iterator[Block]:
    """The blocks of tool declaration, effort and messages; arguments as in `chat_segments`."""
    declared: set[str] = set()
    if tools:
        yield Block(options.tool_declaration(tools, declared, is_new=False), False)
    if thinking and thinking_effort is not None:
        yield Block(options.thinking_effort(thinking_effort), False)
    yield from _message_blocks(messages, thinking, images, declared)


def _message_blocks(
    messages: list[dict[str, Any]], thinking: bool, images: ImagePrompts, declared: set[str]
) -> Iterator[Block]:
    numbered = [(f"messages[{i}]", turn) for i, turn in enumerate(messages)]
    calls: list[Call] = []
    num_results = 0
    for role, group in groupby(numbered, key=_role):
        if role == "tool":
            run = list(group)
            yield Block(_results(run, calls, num_results, images), False)
            num_results += len(run)
            continue
        for where, turn in group:
            if role == "assistant":
                calls, num_results = read_calls(turn, where), 0
                yield from _assistant(turn, calls, thinking, images, where)
            else:
                yield Block(_input(turn, role, images, declared, where), False)


def _role(numbered: tuple[str, Any]) -> str:
    where, turn = numbered
    role = turn.get("role") if isinstance(turn, dict) else None
    if role not in ROLES:
        raise ConversationError(f"{where}: role {role!r} is not one of {', '.join(ROLES)}")
    if role != "system" and turn.get("tools"):
        raise ConversationError(
            f"{where}: only system messages declare tools, this one is {role!r}"
        )
    return role


def _input(
    turn: dict[str, Any], role: str, images: ImagePrompts, declared: set[str], where: str
) -> list[Segment]:
    body = content_segments(turn.get("content"), images, where)
    if turn.get("tools"):
        if body:
            raise ConversationError(
                f"{where}: a system message has tools or content, not both; "
                f"put the content into a message of its own"
            )
        return options.tool_declaration(turn["tools"], declared, is_new=True)
    name = turn.get("name")
    if name is not None and not isinstance(name, str):
        raise ConversationError(f"{where}: name {name!r} is not a string")
    return message({"role": role} | ({"name": name} if name else {}), body)


def _results(
    run: list[tuple[str, dict[str, Any]]], calls: list[Call], num_before: int, images: ImagePrompts
) -> list[Segment]:
    wheres = {id(turn): where for where, turn in run}
    ordered = [turn for _, turn in run]
    names = order_results(ordered, calls, num_before)
    segments: list[Segment] = []
    for index, (turn, name) in enumerate(zip(ordered, names, strict=True), start=num_before + 1):
        body = content_segments(turn.get("content"), images, wheres[id(turn)])
        segments += message({"role": "tool", "tool": name, "index": str(index)}, body)
    return segments


def _assistant(
    turn: dict[str, Any], calls: list[Call], thinking: bool, images: ImagePrompts, where: str
) -> Iterator[Block]:
    yield Block(generation_prefix(thinking), False)
    start: list[Segment] = []
    if thinking:
        start = [*plain(_reasoning(turn, where)), *closer("think"), *opener("response")]
    content = turn.get("content")
    # A model may write the placeholder of an image as text; only images of callers are images.
    if isinstance(content, str):
        start += plain(content)
    else:
        start += content_segments(content, images, where)
    yield Block(start, True)
    yield Block(closer("response"), True)
    if calls:
        yield Block(opener("tools"), True)
        for index, call in enumerate(calls, start=1):
            start, arguments, end = call_segments(call, index)
            yield Block(start, True)
            # Arguments that are no JSON are shown to the model but never learnt (report 8.1).
            yield Block(arguments, not isinstance(call.arguments, str))
            yield Block(end, True)
        yield Block(closer("tools"), True)
    yield Block([*closer("message"), END_OF_MSG], True)


def _reasoning(turn: dict[str, Any], where: str) -> str:
    reasoning = turn.get("reasoning_content")
    if reasoning is None:
        reasoning = turn.get("reasoning")
    if reasoning is not None and not isinstance(reasoning, str):
        raise ConversationError(f"{where}: reasoning is a {type(reasoning).__name__}, not a string")
    return reasoning if reasoning and reasoning.strip() else ""
