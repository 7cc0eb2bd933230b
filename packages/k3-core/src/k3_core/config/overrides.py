"""`--set a.b=c`: change values of a nested mapping from the command line."""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Mapping, Sequence

from .errors import ConfigError


def apply_overrides(mapping: Mapping[str, object], overrides: Sequence[str]) -> dict[str, object]:
    """A copy of `mapping` with every `a.b=c` applied in order.

    The value is read as TOML (`3`, `1e-3`, `true`, `[1, 2]`, `"text"`); what is not TOML is taken
    as a string. A missing table is created: unknown keys are found when the result is read.
    """
    result: dict[str, object] = copy.deepcopy(dict(mapping))
    for item in overrides:
        key, separator, text = item.partition("=")
        parts = [part.strip() for part in key.split(".")]
        if not separator or not all(parts):
            raise ConfigError("--set", f"{item!r} is not key=value", "Write --set table.key=value.")
        table = result
        for depth, part in enumerate(parts[:-1]):
            inner = table.setdefault(part, {})
            if not isinstance(inner, dict):
                name = ".".join(parts[: depth + 1])
                raise ConfigError(
                    "--set", f"{name} is {inner!r}, not a table", "Set it as a whole."
                )
            table = inner
        table[parts[-1]] = parse_value(text.strip())
    return result


def parse_value(text: str) -> object:
    """A TOML value, or the text itself when it is none."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if len(parsed) == 1 else text
