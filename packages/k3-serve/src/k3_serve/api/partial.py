"""A last assistant message with `partial: true`: the answer begins with it (serving 2a).

The generation prefix of a thinking turn opens the think channel. With content the reasoning is
closed and the content continues; with reasoning only, that continues.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from k3_core.xtml.segments import Segment, closer, opener, plain
from k3_serve.api.errors import bad_request

ALLOWED = frozenset({"role", "partial", "content", "reasoning_content", "reasoning", "name"})


@dataclass(frozen=True)
class Prefix:
    """What follows the generation prefix in the prompt.

    `text` is the part of it in `channel`, where the output goes on.
    """

    segments: list[Segment]
    channel: Literal["think", "response"]
    text: str


def prefix_of(messages: list[dict[str, Any]], is_thinking: bool) -> Prefix | None:
    """The prefix that the last message asks for; None when it asks for none.

    Raises ApiError 400 for a partial message elsewhere and for one that is more than text.
    """
    last = len(messages) - 1
    for index, message in enumerate(messages):
        if message.get("partial") and (index < last or message.get("role") != "assistant"):
            where = f"messages[{index}].partial"
            raise bad_request(f"{where}: only the last message, of the assistant, may be", where)
    if not messages[last].get("partial"):
        return None
    where = f"messages[{last}]"
    extra = sorted(key for key in messages[last] if key not in ALLOWED and messages[last][key])
    if extra:
        raise bad_request(f"{where} is partial and has {extra[0][:80]!r}; give text only", where)
    content = _text(messages[last].get("content"), f"{where}.content")
    reasoning = messages[last].get("reasoning_content") or messages[last].get("reasoning") or ""
    if not isinstance(reasoning, str):
        raise bad_request(f"{where}.reasoning_content is not a string", where)
    if not is_thinking:
        return Prefix(plain(content), "response", content)
    if not content:
        return Prefix(plain(reasoning), "think", reasoning)
    thought = [*plain(reasoning), *closer("think"), *opener("response")]
    return Prefix([*thought, *plain(content)], "response", content)


def _text(content: Any, where: str) -> str:
    parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    if len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
        raise bad_request(f"{where} of a partial message must be text", where)
    return "".join(texts)  # type: ignore[arg-type]
