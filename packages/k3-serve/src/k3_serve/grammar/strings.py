"""String schemas as regular expressions: XTML has a string's text as it is, without JSON's quotes
and escapes, so the grammar of JSON does not apply to it (serving 4a)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from llguidance import regex_to_lark

from k3_serve.grammar.lark import GrammarError, Lark, either, literal
from k3_serve.grammar.schema import Schema

ANY = "/(?s:.*)/"
NOT_ENFORCED = ("not", "if")

_TIME = (
    r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+\-]([01][0-9]|2[0-3]):[0-5][0-9])"
)
_DATE = (
    r"([0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    r"|02-(0[1-9]|1[0-9]|2[0-8]))"
    r"|([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)-02-29)"
)
_LABEL = r"[a-zA-Z0-9]([a-zA-Z0-9\-]{0,61}[a-zA-Z0-9])?"
_HOST = rf"{_LABEL}(\.{_LABEL}){{0,7}}"
_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_GROUP = r"[0-9a-fA-F]{1,4}"
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "email": rf"[a-zA-Z0-9_+\-]+(\.[a-zA-Z0-9_+\-]+)*@{_HOST}",
    "hostname": _HOST,
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "ipv6": rf"({_GROUP}:){{7}}{_GROUP}|::({_GROUP}(:{_GROUP}){{0,6}})?",
    "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "uri": r"[a-zA-Z][a-zA-Z0-9+.\-]*:[a-zA-Z0-9\-._~:/?#@!$&'()*+,;=]+",
}
"""Each matches only what the format allows, though not all of it (no comment in an e-mail address,
two of the spellings of an IPv6 address)."""


def string_terminal(schema: Schema, lark: Lark, where: str) -> str:
    """The name of a terminal for the strings that a schema (narrowed to strings) allows.

    Raises GrammarError for what cannot be enforced.
    """
    return lark.terminal(_expression(schema, lark, where))


def _expression(schema: Any, lark: Lark, where: str) -> str:
    terms = list(_terms(schema, lark, where)) if isinstance(schema, dict) else []
    return " & ".join(terms) if terms else ANY


def _terms(schema: dict[str, Any], lark: Lark, where: str) -> Iterator[str]:
    """Expressions that all have to match."""
    for keyword in NOT_ENFORCED:
        if keyword in schema and not lark.is_lenient:
            raise GrammarError(f"{where}: {keyword!r} cannot be enforced; leave it out")
    if "const" in schema:
        yield literal(schema["const"])
    if "enum" in schema:
        yield either([literal(value) for value in schema["enum"]])
    if "pattern" in schema:
        yield _pattern(schema["pattern"], where)
    if "minLength" in schema or "maxLength" in schema:
        yield _length(schema, where)
    if "format" in schema:
        yield from _format(schema["format"], lark, where)
    branches = {
        name: [f"({_expression(branch, lark, where)})" for branch in schema.get(name, ())]
        for name in ("anyOf", "oneOf", "allOf")
    }
    yield from branches["allOf"]
    if branches["anyOf"]:
        yield either(branches["anyOf"])
    if branches["oneOf"]:
        yield either(_exclusive(branches["oneOf"]))


def _exclusive(branches: list[str]) -> list[str]:
    """The branches without what another of them matches too."""
    if len(branches) == 1:
        return branches
    others = [branches[:i] + branches[i + 1 :] for i in range(len(branches))]
    return [
        f"({mine} & ~{either(rest)} & {ANY})" for mine, rest in zip(branches, others, strict=True)
    ]


def _length(schema: dict[str, Any], where: str) -> str:
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    for value in (least, most or 0):
        if type(value) is not int or value < 0:
            raise GrammarError(f"{where}: length {str(value)[:20]!r} is not an integer from 0 on")
    if most != "" and most < least:
        raise GrammarError(f"{where}: no value fits a minLength {least} and a maxLength {most}")
    return f"/(?s:.{{{least},{most}}})/"


def _format(name: Any, lark: Lark, where: str) -> Iterator[str]:
    if name in FORMATS:
        yield f"/{regex_to_lark(FORMATS[name])}/"
    elif not lark.is_lenient:
        raise GrammarError(
            f"{where}: format {str(name)[:40]!r} cannot be enforced; use one of "
            f"{', '.join(FORMATS)}, or a pattern"
        )


def _pattern(pattern: Any, where: str) -> str:
    """A terminal expression for the texts in which the pattern, a regular expression, is found."""
    if not isinstance(pattern, str):
        raise GrammarError(f"{where}: pattern is not a string")
    arms = [_anchored(arm, where) for arm in _top_level_arms(pattern)]
    return either([f"/{regex_to_lark(arm, 'dw')}/" for arm in arms])


_PIECE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)


def _top_level_arms(pattern: str) -> list[str]:
    arms, depth = [""], 0
    for piece in _PIECE.findall(pattern):
        depth += (piece == "(") - (piece == ")")
        if piece == "|" and depth == 0:
            arms.append("")
        else:
            arms[-1] += piece
    return arms


def _anchored(arm: str, where: str) -> str:
    """The arm between `.*` where it has no anchor; llguidance matches the whole text."""
    pieces = _PIECE.findall(arm)
    start = end = "(?s:.*)"
    if pieces[:1] == ["^"]:
        start, pieces = "", pieces[1:]
    if pieces[-1:] == ["$"]:
        end, pieces = "", pieces[:-1]
    if any(piece in ("^", "$", r"\b", r"\B", r"\A", r"\Z") for piece in pieces):
        raise GrammarError(
            f"{where}: pattern {arm[:80]!r} has an anchor inside, which cannot be enforced"
        )
    return f"{start}({''.join(pieces)}){end}"
