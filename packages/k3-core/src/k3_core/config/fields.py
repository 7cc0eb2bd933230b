"""Checked conversion of plain values (JSON, TOML) to the annotated types of a dataclass."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import types
import typing
from collections.abc import Mapping, Sequence

from .errors import ConfigError, bad_value

_NAMES = {bool: "true or false", int: "an integer", float: "a finite number", str: "a string"}


_cached_hints = functools.cache(typing.get_type_hints)


def type_hints(cls: typing.Any) -> dict[str, typing.Any]:
    """Evaluated annotations of a dataclass."""
    return _cached_hints(cls)


def convert(value: object, hint: typing.Any, path: str) -> typing.Any:
    """Return `value` as the type `hint` says; raise ConfigError(path) when it is another type.

    Handles bool, int, float (an integer is accepted), str, Literal, X | None, tuple[X, ...],
    list[X], mappings and nested dataclasses.
    """
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return _convert_union(value, typing.get_args(hint), path)
    if origin is typing.Literal:
        return _convert_literal(value, typing.get_args(hint), path)
    if origin in (tuple, list):
        return _convert_sequence(value, hint, path)
    if dataclasses.is_dataclass(hint):
        return _convert_dataclass(value, hint, path)
    if origin in (dict, Mapping) or hint in (dict, Mapping):
        if not isinstance(value, Mapping):
            raise bad_value(path, value, "a table of key-value pairs")
        return copy.deepcopy(dict(value))
    if hint in _NAMES:
        return _convert_scalar(value, hint, path)
    if hint in (object, typing.Any):
        return value
    raise TypeError(f"{path}: fields of type {hint} cannot be read from a file")


def _convert_scalar(value: object, hint: type, path: str) -> object:
    if hint is float and type(value) is int:
        value = float(value)
    if type(value) is not hint or (isinstance(value, float) and not math.isfinite(value)):
        raise bad_value(path, value, _NAMES[hint])
    return value


def _convert_literal(value: object, allowed: tuple[object, ...], path: str) -> object:
    if any(type(value) is type(one) and value == one for one in allowed):
        return value
    listed = " or ".join(repr(one) for one in allowed)
    raise bad_value(path, value, listed, f"Set {path} to {listed}; K3 has no other variant.")


def _convert_union(value: object, hints: tuple[typing.Any, ...], path: str) -> object:
    if value is None and type(None) in hints:
        return None
    rest = [hint for hint in hints if hint is not type(None)]
    for hint in rest[:-1]:
        try:
            return convert(value, hint, path)
        except ConfigError:
            continue
    return convert(value, rest[-1], path)


def _convert_sequence(value: object, hint: typing.Any, path: str) -> object:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise bad_value(path, value, "a list")
    args = typing.get_args(hint)
    is_open = typing.get_origin(hint) is list or args[-1] is Ellipsis
    if not is_open and len(args) != len(value):
        raise bad_value(path, value, f"a list of {len(args)}")
    items = [convert(v, args[0 if is_open else i], f"{path}[{i}]") for i, v in enumerate(value)]
    return items if typing.get_origin(hint) is list else tuple(items)


def _convert_dataclass(value: object, cls: typing.Any, path: str) -> object:
    if isinstance(value, cls):
        return value
    if not isinstance(value, Mapping):
        raise bad_value(path, value, "a table of key-value pairs")
    if not hasattr(cls, "from_dict"):
        from .toml import load_dataclass

        return load_dataclass(cls, value, path)
    try:
        return cls.from_dict(value)
    except ConfigError as error:
        raise error.within(path) from None
