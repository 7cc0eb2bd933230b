"""The JSON schema of a run's TOML file, made from the dataclasses: types, ranges, docs, defaults.

The docs are the docstrings of `k3_train.config`, in which `name: what it is.` describes a setting,
and `one, other: ...` several.
"""

import dataclasses
import math
import re
import types
import typing
from collections.abc import Mapping
from typing import Any

from k3_core.config.fields import type_hints
from k3_train.config import RANGES, TrainConfig

_PLAIN = {bool: "boolean", int: "integer", float: "number", str: "string"}


def config_schema() -> dict[str, Any]:
    """JSON schema (2020-12) of what `k3 train fit --config` reads."""
    schema = _object(TrainConfig, "", TrainConfig())
    schema["properties"]["extends"] = {
        "type": "string",
        "description": "A TOML file, by its path from this one's folder, whose tables come first.",
    }
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "k3 train"}
    return head | schema


def setting_docs(cls: Any) -> dict[str, str]:
    """What the docstring of a section says about each of its settings, by name."""
    text = " ".join((cls.__doc__ or "").split())
    names = "|".join(one.name for one in dataclasses.fields(cls))
    mark = re.compile(rf"(?:^|(?<=[\s;]))((?:{names})(?:, (?:{names}))*): ")
    found = list(mark.finditer(text))
    docs: dict[str, str] = {}
    ends = [*(match.start() for match in found), len(text)]
    for match, end in zip(found, ends[1:], strict=True):
        body = text[match.end() : end].strip().rstrip(";.")
        docs |= dict.fromkeys(match[1].split(", "), body)
    return docs


def _object(cls: Any, path: str, default: Any) -> dict[str, Any]:
    hints, docs = type_hints(cls), setting_docs(cls)
    properties, required = {}, []
    for one in dataclasses.fields(cls):
        name = f"{path}.{one.name}" if path else one.name
        value = getattr(default, one.name, dataclasses.MISSING)
        properties[one.name] = _value(hints[one.name], name, value)
        if one.name in docs:
            properties[one.name]["description"] = docs[one.name]
        if default is None and one.default is one.default_factory is dataclasses.MISSING:
            required.append(one.name)
    summary = (cls.__doc__ or "").partition("\n\n")[0]
    schema = {
        "type": "object",
        "description": " ".join(summary.split()),
        "properties": properties,
        "additionalProperties": False,
    }
    return schema | ({"required": required} if required else {})


def _value(hint: Any, path: str, default: Any) -> dict[str, Any]:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _object(hint, path, None if default is dataclasses.MISSING else default)
    if origin is typing.Literal:
        schema: dict[str, Any] = {"enum": list(args)}
    elif origin in (dict, Mapping):
        schema = {
            "type": "object",
            "additionalProperties": _value(args[1], "", dataclasses.MISSING),
        }
    elif origin in (tuple, list):
        schema = {"type": "array", "items": _value(args[0], "", dataclasses.MISSING)}
    elif origin in (typing.Union, types.UnionType):
        schema = {"anyOf": [_value(one, path, dataclasses.MISSING) for one in args]}
    elif hint is type(None):
        schema = {"type": "null"}
    else:
        schema = {"type": _PLAIN[hint]} if hint in _PLAIN else {}
    if default is not dataclasses.MISSING:
        schema["default"] = list(default) if isinstance(default, tuple) else default
    return schema | _range(path)


def _range(path: str) -> dict[str, float]:
    low, high = RANGES.get(path, (-math.inf, math.inf))
    limits = {"minimum": low, "maximum": high}
    return {name: limit for name, limit in limits.items() if math.isfinite(limit)}
