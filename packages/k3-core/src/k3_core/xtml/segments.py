"""Segments of rendered XTML: trusted control text beside caller text (report 8.1, architecture 8).

An element is `<|open|>tag k="v"<|sep|> body <|close|>tag<|sep|>`. Only segments flagged
`is_control` are encoded with special tokens recognised; whatever a caller wrote is in the others,
so it can never become a control token.
"""

from collections.abc import Mapping
from typing import NamedTuple


class Segment(NamedTuple):
    """A piece of a rendered conversation that is encoded on its own."""

    text: str
    is_control: bool


OPEN = Segment("<|open|>", True)
CLOSE = Segment("<|close|>", True)
SEP = Segment("<|sep|>", True)
END_OF_MSG = Segment("<|end_of_msg|>", True)


def plain(text: str) -> list[Segment]:
    """Caller text; an empty one gives no segment."""
    return [Segment(text, False)] if text else []


def opener(tag: str, attributes: Mapping[str, str] | None = None) -> list[Segment]:
    """Open an element. Each attribute is four segments; its value escapes `&` and `"`."""
    segments = [OPEN, *plain(tag)]
    for key, value in (attributes or {}).items():
        escaped = value.replace("&", "&amp;").replace('"', "&quot;")
        segments += [*plain(f" {key}"), *plain('="'), *plain(escaped), *plain('"')]
    return [*segments, SEP]


def closer(tag: str) -> list[Segment]:
    """Close an element."""
    return [CLOSE, *plain(tag), SEP]


def element(
    tag: str, body: list[Segment], attributes: Mapping[str, str] | None = None
) -> list[Segment]:
    """An opener, the body and the closer."""
    return [*opener(tag, attributes), *body, *closer(tag)]


def message(attributes: Mapping[str, str], body: list[Segment]) -> list[Segment]:
    """A whole message: its element and the end-of-message token."""
    return [*element("message", body, attributes), END_OF_MSG]
