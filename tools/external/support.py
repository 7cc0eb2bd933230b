"""Requests and helpers of the matrix of the openai client."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import Any

import openai

LIMIT = {"temperature": 0, "max_completion_tokens": 160}
ASK = [{"role": "user", "content": "What is 12 + 30?"}]
LOOKUP = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look up the value of a key.",
        "parameters": {
            "type": "object",
            "properties": {"key": {"type": "string"}},
            "required": ["key"],
        },
    },
}
OTHER = {
    "type": "function",
    "function": {"name": "now", "parameters": {"type": "object", "properties": {}}},
}
SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "integer"}, "unit": {"enum": ["m", "s"]}},
    "required": ["sum", "unit"],
    "additionalProperties": False,
}


def raised(kind: type[Exception], action: Callable[[], object]) -> Any:
    """The exception of this kind that the action raises; AssertionError for none."""
    try:
        action()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def text_of(chunks: list[Any]) -> str:
    """The content of a streamed chat."""
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


def num_running(client: openai.OpenAI) -> float:
    """Requests that the server's metrics show as running."""
    base = str(client.base_url).rstrip("/").removesuffix("/v1")
    text = client._client.get(f"{base}/metrics").text  # the client's own connection
    lines = [line for line in text.splitlines() if line.startswith("k3_requests_running{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def png(width: int, height: int) -> bytes:
    """A picture of a gradient, written by hand: this environment has no imaging library."""
    rows = b"".join(
        b"\0" + bytes(value for x in range(width) for value in (x * 4 % 256, y * 8 % 256, 90))
        for y in range(height)
    )

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)
