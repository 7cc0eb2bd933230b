"""Frozen dataclasses from TOML files: strict keys, checked types, `--set` changes (design 7)."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from .errors import ConfigError, hint
from .fields import convert, type_hints
from .overrides import apply_overrides

T = TypeVar("T")


def load_dataclass(cls: type[T], mapping: Mapping[str, object], path: str = "") -> T:
    """Build dataclass `cls` from nested plain values.

    `path` is the dotted name of the table, for messages. Raises ConfigError for an unknown key
    (with the nearest known one), a missing key and a value of another type.
    """
    fields = {one.name: one for one in dataclasses.fields(cls) if one.init}  # type: ignore[arg-type]
    hints = type_hints(cls)
    prefix = f"{path}." if path else ""
    for key in mapping:
        if key not in fields:
            raise ConfigError(prefix + key, "unknown key", hint(key, fields))
    for name, one in fields.items():
        has_default = not (
            one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING
        )
        if name not in mapping and not has_default:
            raise ConfigError(prefix + name, "is missing and has no default", f"Add {name}.")
    return cls(**{key: convert(mapping[key], hints[key], prefix + key) for key in mapping})


def read_toml(path: str | Path) -> dict[str, object]:
    """Read a TOML file; raise ConfigError with the file and line when it cannot be read."""
    file = Path(path)
    if not file.is_file():
        raise ConfigError(str(file), "no such file", "Give the path of a TOML file.")
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(str(file), f"not TOML ({error})", "Repair the file.") from None


def load_config(
    cls: type[T], path: str | Path | None = None, overrides: Sequence[str] = ()
) -> tuple[T, dict[str, object]]:
    """Read `cls` from a TOML file (or its defaults), apply `a.b=c` overrides.

    Returns the object and the `[impl]` table, which is handed to the registry unchanged.
    """
    values = apply_overrides(read_toml(path) if path is not None else {}, overrides)
    impl = values.pop("impl", {})
    if not isinstance(impl, Mapping):
        raise ConfigError("impl", f"{impl!r} is not a table", "Write implementations as [impl].")
    return load_dataclass(cls, values), dict(impl)
