"""Streamed chat deltas on a terminal; plain text where it is none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

REASONING, CALLS = "dim", "cyan"


class Transcript:
    """Shows one answer: reasoning dimmed, the answer plain, tool calls coloured, each on its line.

    `indent` stands in front of each of them.
    """

    def __init__(self, console: Console, indent: str = "") -> None:
        self._console = console
        self._indent = indent
        self._style: str | None = ""  # of no text yet

    def show(self, delta: Mapping[str, Any]) -> None:
        """Writes one delta at the cursor."""
        for text, style in _pieces(delta):
            if style != self._style:
                write(self._console, ("\n" if self._style != "" else "") + self._indent)
                self._style = style
            write(self._console, text, style)


def _pieces(delta: Mapping[str, Any]) -> Iterator[tuple[str, str | None]]:
    """The texts of a delta with their styles."""
    if delta.get("reasoning_content"):
        yield delta["reasoning_content"], REASONING
    if delta.get("content"):
        yield delta["content"], None
    for call in delta.get("tool_calls") or ():
        function = call.get("function", {})
        name = f"{function['name']} " if "name" in function else ""
        yield name + function.get("arguments", ""), CALLS


def write(console: Console, text: str, style: str | None = None) -> None:
    """Writes text as it is: no wrapping, no markup, at once."""
    console.out(text, style=style, end="", highlight=False)
    console.file.flush()
