"""The arguments of a tool as a grammar of XTML elements, one an argument (serving 4a).

Arguments come in the order of the schema's properties. Where `additionalProperties` is not given
the declared ones are the only ones: that is narrower than JSON schema, and what callers mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from k3_serve.grammar.lark import GrammarError, Lark, either, literal
from k3_serve.grammar.schema import MEANINGFUL, TYPES, Root, Schema, narrow
from k3_serve.grammar.strings import string_terminal

ENFORCED = frozenset({"type", "properties", "required", "additionalProperties"})
_KEY = r"/([^\"&\x00-\x1f]|&amp;|&quot;){1,64}/"


def arguments_of(parameters: Schema | None, lark: Lark, where: str) -> str:
    """The name of a rule for all the arguments of a call; no parameters means any arguments.

    Raises GrammarError for what cannot be enforced, unless the grammar is lenient.
    """
    root = Root({} if parameters is None else parameters)
    schema = root.resolve(root.schema, where)
    if isinstance(schema, bool):
        schema = {} if schema else {"type": []}
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise GrammarError(f"{where}: type {str(kind)[:80]!r} is not 'object'")
    beyond = sorted((MEANINGFUL & schema.keys()) - ENFORCED)
    if beyond and not lark.is_lenient:
        raise GrammarError(
            f"{where}: {', '.join(beyond)} of the arguments as a whole cannot be enforced; "
            f"use {', '.join(sorted(ENFORCED))}, or leave out strict"
        )
    return lark.rule(" ".join(_elements(schema, root, lark, where)) or '""')


def _elements(schema: dict[str, Any], root: Root, lark: Lark, where: str) -> Iterator[str]:
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise GrammarError(f"{where}: properties is not an object or required is not a list")
    others = schema.get("additionalProperties", not properties)
    for key in [*properties, *(key for key in required if key not in properties)]:
        place = f"{where}.properties[{str(key)[:80]!r}]"
        if not isinstance(key, str):
            raise GrammarError(f"{where}: required has {str(key)[:80]!r}, which is no name")
        values = _argument(_attribute(key), properties.get(key, others), root, lark, place)
        if values is None and key in required:
            raise GrammarError(f"{place} is required, but no value fits its schema")
        if values is not None:
            yield values if key in required else f"{values}?"
    declared = [literal(_escaped(key)) for key in properties]
    name = lark.terminal(f"{_KEY} & ~{either(declared)}" if declared else _KEY)
    more = _argument(f'"\\"" {name} "\\""', others, root, lark, f"{where}.additionalProperties")
    if more is not None:
        yield f"{more}*"


def _argument(key: str, schema: Any, root: Root, lark: Lark, where: str) -> str | None:
    """The name of a rule for one argument with any value that fits; None when none does."""
    arms = []
    for kind in TYPES:
        part = narrow(schema, kind, root, where)
        if part is None:
            continue
        if kind == "string":
            value = string_terminal(part, lark, where)
        else:
            value = lark.json(root.closed(part), is_argument=True)
        kind_attribute = literal(f' type="{kind}"')
        opener = lark.opener(f'"argument key=" {key} {kind_attribute}')
        arms.append(f"{opener} {value} {lark.closer('argument')}")
    return lark.rule(" | ".join(arms)) if arms else None


def _attribute(key: str) -> str:
    return literal(f'"{_escaped(key)}"')


def _escaped(value: str) -> str:
    return value.replace("&", "&amp;").replace('"', "&quot;")
