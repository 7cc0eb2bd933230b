"""Base of the released configuration sections: JSON in, the same JSON out, checked in between."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field
from typing import Any, Self

from .errors import ConfigError
from .fields import convert, type_hints

_OWN = {"extra", "given"}


def ours(default: Any) -> Any:
    """A field the released class does not have: written only when it differs from `default`."""
    return field(default=default, metadata={"ours": True})


def unwritten(default: Any) -> Any:
    """A field that lives elsewhere (checkpoint metadata), never in config.json."""
    return field(default=default, metadata={"unwritten": True})


@dataclass(frozen=True, kw_only=True)
class ConfigPart:
    """A section of config.json.

    extra: fields that the released class does not define, kept as they are.
    given: the keys of the source in their order; None for a section made in code. `to_dict`
        writes the given keys and every field that was changed since; without a source it
        writes every released field.
    """

    extra: Mapping[str, object] = field(default_factory=dict)
    given: tuple[str, ...] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        hints = type_hints(type(self))
        for one in self._fields():
            value = convert(getattr(self, one.name), hints[one.name], one.name)
            object.__setattr__(self, one.name, value)
        self.validate()

    def validate(self) -> None:
        """Check values against each other; raise ConfigError."""

    @classmethod
    def _fields(cls) -> list[Field[Any]]:
        return [one for one in dataclasses.fields(cls) if one.name not in _OWN]

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Self:
        """Read a section; unknown keys go to `extra`. Raises ConfigError."""
        known = {one.name: one for one in cls._fields() if "unwritten" not in one.metadata}
        for name, one in known.items():
            if name not in data and one.default is MISSING and one.default_factory is MISSING:
                raise ConfigError(name, "is missing and has no default", f"Add {name}.")
        values: dict[str, Any] = {key: data[key] for key in data if key in known}
        extra = {key: copy.deepcopy(data[key]) for key in data if key not in known}
        return cls(**values, extra=extra, given=tuple(data))

    def to_dict(self) -> dict[str, object]:
        """The section as JSON values; `from_dict(d).to_dict() == d` with the same key order."""
        written = {one.name: one for one in self._fields() if self._is_written(one)}
        order = [key for key in self.given or () if key in written or key in self.extra]
        rest = [key for key in (*written, *self.extra) if key not in order]
        return {
            key: to_plain(getattr(self, key) if key in written else self.extra[key])
            for key in (*order, *rest)
        }

    def _is_written(self, one: Field[Any]) -> bool:
        if "unwritten" in one.metadata:
            return False
        if self.given is None and "ours" not in one.metadata:
            return True
        is_default = one.default is not MISSING and getattr(self, one.name) == one.default
        return not is_default or one.name in (self.given or ())


def to_plain(value: object) -> object:
    """Sections, tuples and mappings as JSON values."""
    if isinstance(value, ConfigPart):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {key: to_plain(one) for key, one in value.items()}
    if isinstance(value, tuple | list):
        return [to_plain(one) for one in value]
    return value
