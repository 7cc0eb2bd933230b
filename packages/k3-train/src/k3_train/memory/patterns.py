"""The table `[memory]`: from patterns of names to the policies of each function.

A key is a module by its name below `language_model.model.` or, outside of it, by its full name;
`*`, `?` and `[0-3]` stand for parts of one component: `layers.*.self_attn`, `vision_tower.*`. Or it
is `op:NAME`, for every call of an op. A value is a policy or a list of them. Tables have no order:
of two keys that fit a module, the one with more literal components counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from k3_core.config.errors import ConfigError, bad_value
from k3_core.errors import nearest

OP = "op:"
_DECODER = "language_model.model."
_WILD = frozenset("*?[")

Table = Mapping[str, object]


def short_name(name: str) -> str:
    """What a module is called in the table."""
    return name.removeprefix(_DECODER)


def policy_names(table: Table) -> dict[str, tuple[str, ...]]:
    """The policies of each key; ConfigError for a value that is not a name or a list of names."""
    return {key: _names(key, value) for key, value in table.items()}


def _names(key: str, value: object) -> tuple[str, ...]:
    given = [value] if isinstance(value, str) else value
    names = [one for one in given if isinstance(one, str)] if isinstance(given, list) else []
    if not names or names != given:
        raise bad_value(path_of(key), value, "the name of a policy, or a list of names")
    return tuple(dict.fromkeys(names))


def path_of(key: str) -> str:
    """A key, for messages."""
    return f'memory."{key}"'


def match_modules(keys: Iterable[str], names: Iterable[str]) -> dict[str, str]:
    """The key that counts for each module that one fits.

    Raises ConfigError for a key that fits none, and for two that fit equally well.
    """
    names = list(names)
    chosen: dict[str, str] = {}
    for key in keys:
        fitting = [name for name in names if _fits(key, name)]
        if not fitting:
            raise ConfigError(path_of(key), "no module has such a name", _hint(key, names))
        for name in fitting:
            other = chosen.get(name)
            if other is not None and _literals(other) == _literals(key):
                raise ConfigError(
                    path_of(key),
                    f"{name} is also meant by {other!r}, and neither says more",
                    "Write the exception with fewer wildcards.",
                )
            if other is None or _literals(key) > _literals(other):
                chosen[name] = key
    return chosen


def check_op(key: str, known: Iterable[str]) -> str:
    """The op of a key `op:NAME`; ConfigError names the nearest."""
    op, known = key.removeprefix(OP), sorted(known)
    if op not in known:
        close = nearest(op, known)
        hint = f"Did you mean {OP + close!r}?" if close else f"Ops: {', '.join(known)}."
        raise ConfigError(path_of(key), "no op has such a name", hint)
    return op


def _fits(key: str, name: str) -> bool:
    parts, own = key.split("."), name.split(".")
    return len(parts) == len(own) and all(map(fnmatchcase, own, parts))


def _literals(key: str) -> int:
    return sum(not _WILD & set(part) for part in key.split("."))


def _hint(key: str, names: Iterable[str]) -> str:
    """The nearest name, numbers of layers as wildcards."""
    general = {".".join("*" if p.isdigit() else p for p in name.split(".")) for name in names}
    wanted = ".".join("*" if p.isdigit() else p for p in key.split("."))
    close = nearest(wanted, general)
    if close:
        return f"Did you mean {close!r}?"
    return f"Names begin with {', '.join(sorted({name.partition('.')[0] for name in names}))}."
