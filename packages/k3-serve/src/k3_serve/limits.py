"""What one request may cost, checked before the work (serving 8)."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any

from k3_core.errors import K3Error

STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
BRACKETS = b"[]{}"
NOT_BRACKETS = bytes(set(range(256)) - set(BRACKETS))


@dataclass(frozen=True)
class Limits:
    """Bounds of one request, and of one key. Sizes in bytes and pixels, the rest are counts.

    `max_key_requests` bounds the requests of one key that run or wait at the same time;
    `body_seconds` the time a body may take to arrive, `send_seconds` the time a reader may stand
    still before its request is given up.
    """

    max_body_bytes: int = 32 * 2**20
    max_header_bytes: int = 32 * 2**10
    max_depth: int = 64
    max_messages: int = 10_000
    max_tools: int = 1024
    max_schema_bytes: int = 256 * 2**10
    max_images: int = 32
    max_image_pixels: int = 64 * 2**20
    max_request_pixels: int = 128 * 2**20
    max_prompts: int = 1024
    max_key_requests: int = 256
    body_seconds: float = 60.0
    send_seconds: float = 120.0

    def __post_init__(self) -> None:
        for field in fields(self):
            if (value := getattr(self, field.name)) <= 0:
                raise K3Error(f"limit {field.name} is {value}; it must be above 0")


def nesting(body: bytes) -> int:
    """The deepest nesting of JSON text in UTF-8: 1 for a flat object, strings left out.

    Costs a few passes at the speed of memory and never recurses. Of text that is no JSON it
    says something harmless: the parser refuses that afterwards.
    """
    marks = STRING.sub(b"", body).translate(None, NOT_BRACKETS)
    steps = (1 if mark in b"[{" else -1 for mark in marks)
    return max(accumulate(steps, initial=0))


def is_nested_deeper(body: bytes, max_depth: int) -> bool:
    """Whether the nesting of a body exceeds a depth; most bodies have too few brackets to ask."""
    if body.count(b"[") + body.count(b"{") <= max_depth:
        return False
    return nesting(body) > max_depth


def schema_bytes(schema: Any) -> int:
    """The size of a JSON schema as compact JSON, for `Limits.max_schema_bytes`."""
    return len(json.dumps(schema, ensure_ascii=False, separators=(",", ":")).encode())
