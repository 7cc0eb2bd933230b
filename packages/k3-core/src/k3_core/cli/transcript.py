"""Streamed chat deltas on a terminal; plain text where it is none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def show_delta(console: Console, delta: Mapping[str, Any]) -> None:
    """Writes one delta at the cursor: reasoning dimmed, the answer plain, tool calls coloured."""
    if delta.get("reasoning_content"):
        write(console, delta["reasoning_content"], "dim")
    if delta.get("content"):
        write(console, delta["content"])
    for call in delta.get("tool_calls") or ():
        function = call.get("function", {})
        name = f"{function['name']} " if "name" in function else ""
        write(console, name + function.get("arguments", ""), "cyan")


def write(console: Console, text: str, style: str | None = None) -> None:
    """Writes text as it is: no wrapping, no markup, at once."""
    console.out(text, style=style, end="", highlight=False)
    console.file.flush()
