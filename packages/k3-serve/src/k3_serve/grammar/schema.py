"""JSON schemas taken apart by type, as XTML writes arguments (serving 4a).

The type of an argument is an attribute before its value, so the part of a schema for each type is
a branch of the grammar of its own.
"""

from __future__ import annotations

import json
from typing import Any

from k3_serve.grammar.lark import GrammarError

Schema = dict[str, Any] | bool
TYPES = ("string", "number", "boolean", "null", "object", "array")
DATA = ("const", "enum", "default", "examples")
_CLASSES = {bool: "boolean", int: "number", float: "number", str: "string", type(None): "null"}
_MAX_NESTED_REFERENCES = 64


class Root:
    """A whole schema, in which references of its parts are looked up."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema

    def resolve(self, schema: Any, where: str) -> Schema:
        """The schema without `$ref` at its top: what that refers to is put in its place.

        Raises GrammarError for what is no schema and for a reference that leads nowhere.
        """
        for _ in range(_MAX_NESTED_REFERENCES):
            if not isinstance(schema, dict | bool):
                raise GrammarError(f"{where} is {str(schema)[:80]!r}, not a schema")
            if isinstance(schema, bool) or "$ref" not in schema:
                return schema
            target = self._find(schema["$ref"], where)
            rest = {key: value for key, value in schema.items() if key != "$ref"}
            if MEANINGFUL & rest.keys():
                return {**rest, "allOf": [target, *rest.get("allOf", ())]}
            schema = target
        raise GrammarError(f"{where}: the references of $ref go round in circles")

    def _find(self, reference: Any, where: str) -> Any:
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise GrammarError(f"{where}: $ref {str(reference)[:80]!r} does not begin with #")
        found: Any = self.schema
        for step in reference[1:].strip("/").split("/") if len(reference) > 1 else ():
            name = step.replace("~1", "/").replace("~0", "~")
            found = found.get(name) if isinstance(found, dict) else None
        if found is None:
            raise GrammarError(f"{where}: $ref {reference[:80]!r} leads nowhere")
        return found

    def closed(self, schema: Schema) -> Schema:
        """The part as a schema that stands alone: with the definitions that it refers to."""
        if not isinstance(schema, dict) or '"$ref"' not in json.dumps(schema):
            return schema
        return {**_moved(schema), "$defs": {"root": _moved(self.schema)}}


MEANINGFUL = frozenset(
    [
        "type",
        "enum",
        "const",
        "anyOf",
        "oneOf",
        "allOf",
        "not",
        "if",
        "properties",
        "required",
        "additionalProperties",
        "patternProperties",
        "propertyNames",
        "minProperties",
        "maxProperties",
        "items",
        "prefixItems",
        "minItems",
        "maxItems",
        "contains",
        "uniqueItems",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
        "pattern",
        "minLength",
        "maxLength",
        "format",
        "dependentRequired",
        "dependentSchemas",
    ]
)
"""The keywords that say something of a value; all others are annotations."""


def _moved(schema: Any) -> Any:
    """A copy whose references are to the root, which has moved below `$defs`."""
    if isinstance(schema, list):
        return [_moved(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    copy = {key: value if key in DATA else _moved(value) for key, value in schema.items()}
    reference = copy.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        copy["$ref"] = "#/$defs/root" + reference[1:].rstrip("/")
    return copy


def type_of(value: Any) -> str:
    """The JSON type of a value, as XTML names it."""
    return _CLASSES.get(type(value)) or ("object" if isinstance(value, dict) else "array")


def narrow(schema: Any, kind: str, root: Root, where: str) -> Schema | None:
    """The part of a schema that is about one type; None when no value of that type fits."""
    schema = root.resolve(schema, where)
    if isinstance(schema, bool):
        return {"type": kind} if schema else None
    part: dict[str, Any] | None = {**schema}
    for keyword, change in _NARROWING.items():
        if part is not None and keyword in schema:
            part = change(part, kind, root, where)
    return part if part is None or "type" in part else {"type": kind, **part}


def _narrow_type(part: dict[str, Any], kind: str, root: Root, where: str) -> dict[str, Any] | None:
    given = part["type"]
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list) or not set(names) <= {*TYPES, "integer"}:
        raise GrammarError(f"{where}: type {str(given)[:80]!r} is not one of {', '.join(TYPES)}")
    if kind in names:
        return {**part, "type": kind}
    return {**part, "type": "integer"} if kind == "number" and "integer" in names else None


def _narrow_enum(part: dict[str, Any], kind: str, root: Root, where: str) -> dict[str, Any] | None:
    if not isinstance(part["enum"], list):
        raise GrammarError(f"{where}: enum is not a list")
    values = [value for value in part["enum"] if type_of(value) == kind]
    return {**part, "enum": values} if values else None


def _narrow_const(part: dict[str, Any], kind: str, root: Root, where: str) -> dict[str, Any] | None:
    return part if type_of(part["const"]) == kind else None


def _branches(part: dict[str, Any], name: str, kind: str, root: Root, where: str) -> list[Any]:
    if not isinstance(part[name], list) or not part[name]:
        raise GrammarError(f"{where}: {name} is not a list of schemas")
    return [narrow(branch, kind, root, where) for branch in part[name]]


def _narrow_any(part: dict[str, Any], kind: str, root: Root, where: str) -> dict[str, Any] | None:
    found = [b for b in _branches(part, "anyOf", kind, root, where) if b is not None]
    return {**part, "anyOf": found} if found else None


def _narrow_one(part: dict[str, Any], kind: str, root: Root, where: str) -> dict[str, Any] | None:
    found = [b for b in _branches(part, "oneOf", kind, root, where) if b is not None]
    return {**part, "oneOf": found} if found else None


def _narrow_all(part: dict[str, Any], kind: str, root: Root, where: str) -> dict[str, Any] | None:
    found = _branches(part, "allOf", kind, root, where)
    return None if None in found else {**part, "allOf": found}


_NARROWING = {
    "type": _narrow_type,
    "enum": _narrow_enum,
    "const": _narrow_const,
    "anyOf": _narrow_any,
    "oneOf": _narrow_one,
    "allOf": _narrow_all,
}
