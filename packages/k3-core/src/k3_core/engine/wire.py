"""The chat delta of the OpenAI protocol: how a client and the server fold a stream (serving 4c)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TEXT_FIELDS = ("content", "reasoning_content", "reasoning")


def add_delta(message: dict[str, Any], delta: Mapping[str, Any]) -> None:
    """Adds one streamed `delta` to the assistant `message` that the stream amounts to.

    Texts and argument fragments concatenate; the rest of a tool call comes once, at its index.
    """
    if "role" in delta:
        message["role"] = delta["role"]
    for name in TEXT_FIELDS:
        if delta.get(name) is not None:
            message[name] = (message.get(name) or "") + delta[name]
    for piece in delta.get("tool_calls") or ():
        calls = message.setdefault("tool_calls", [])
        while len(calls) <= piece["index"]:
            calls.append({"id": None, "type": "function", "function": {"arguments": ""}})
        call, function = calls[piece["index"]], piece.get("function", {})
        call.update({key: piece[key] for key in ("id", "type") if key in piece})
        if "name" in function:
            call["function"]["name"] = function["name"]
        call["function"]["arguments"] += function.get("arguments", "")
