"""What the parser knows of XTML: where each element stands, headers, argument types.

Report 8.1, architecture 8. Every element of an assistant body has one place, so the path of the
innermost open element is the whole context.
"""

import json
import re
from typing import Any, NamedTuple

CHANNELS = ("think", "response", "tools")
PATHS: dict[str, list[str]] = {
    "think": ["think"],
    "response": ["response"],
    "tools": ["tools"],
    "call": ["tools", "call"],
    "argument": ["tools", "call", "argument"],
    "json": ["tools", "call", "json"],
}
IDENTIFIERS = {"call": "tool", "argument": "key"}  # an opener without it has no meaning

_HEADER = re.compile(r'([^\s"=]+)((?:\s+[^\s"=]+="[^"]*")*)\s*')
_ATTRIBUTE = re.compile(r'([^\s"=]+)="([^"]*)"')
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "object": (dict,),
    "array": (list,),
}


class Header(NamedTuple):
    """The inside of an opener."""

    tag: str
    attributes: dict[str, str]


def read_header(text: str) -> Header | None:
    """Tag and unescaped attributes of an opener; None when it is not of that form."""
    match = _HEADER.fullmatch(text)
    if match is None:
        return None
    pairs = _ATTRIBUTE.findall(match[2])
    return Header(match[1], {key: _unescape(value) for key, value in pairs})


def argument_json(raw: str, kind: str) -> tuple[str, str | None]:
    """The JSON text of a non-string argument, and what is wrong with it if anything.

    A value is passed on as written, so that numbers keep their digits. What is no JSON (NaN, or
    nesting too deep to check) becomes a JSON string.
    """
    try:
        value = json.loads(raw, parse_int=_zero, parse_float=_zero, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(raw, ensure_ascii=False), f"argument {raw[:80]!r} is no JSON"
    if type(value) not in _TYPES.get(kind, ()):
        return raw, f"argument {raw[:80]!r} is not of type {kind!r} ({', '.join(_TYPES)})"
    return raw, None


def _unescape(value: str) -> str:
    # In the reverse order of the escaping: "&amp;quot;" was the text "&quot;".
    return value.replace("&quot;", '"').replace("&amp;", "&")


def _zero(_: str) -> int:
    # Only the type of a number matters; reading it would fail beyond 4300 digits.
    return 0


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
