"""Implementations named by the environment or by the `[impl]` table of a TOML config.

`K3_IMPL_<KIND>_<OP>=name` and `K3_IMPL_<KIND>=name`; in TOML `[impl]` with `kernel.kda_chunk =
"kda_chunk.reference"` or `kernel = "reference"`. The short form of a name is its variant, so that
one setting can name the same variant for every op of a kind. Source: design 3 (registry).
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from k3_core.errors import PluginError, nearest
from k3_core.plugins.types import KINDS, Impl, Request

PREFIX = "K3_IMPL_"


def named_by_environ(
    request: Request, impls: list[Impl], environ: Mapping[str, str]
) -> tuple[str, str] | None:
    """(variable, name) when the environment names an implementation for the request."""
    table = {key: value for key, value in environ.items() if key.startswith(PREFIX) and value}
    allowed = {env_variable(kind): (kind, "") for kind in KINDS}
    allowed |= {env_variable(i.kind, i.implements): (i.kind, i.implements) for i in impls}
    for key in table:
        if key not in allowed:
            raise PluginError(f"{key} names no kind or op{_hint(key, allowed)}")
    special, general = env_variable(request.kind, request.implements), env_variable(request.kind)
    return _pick(request, impls, special, table.get(special), general, table.get(general))


def named_by_config(
    request: Request, impls: list[Impl], overrides: Mapping[str, Any]
) -> tuple[str, str] | None:
    """(key, name) when the `[impl]` table, nested or with dotted keys, names an implementation."""
    table = dict(_flatten(overrides))
    allowed = set(KINDS) | {f"{impl.kind}.{impl.implements}" for impl in impls}
    for key, value in table.items():
        if key not in allowed:
            raise PluginError(f"[impl] {key} names no kind or op{_hint(key, allowed)}")
        if not isinstance(value, str):
            raise PluginError(f"[impl] {key} = {value!r}: give the name of an implementation")
    special, general = f"{request.kind}.{request.implements}", request.kind
    return _pick(request, impls, special, table.get(special), general, table.get(general))


def env_variable(kind: str, implements: str = "") -> str:
    """The variable that names an implementation: `K3_IMPL_ATTENTION_KDA`."""
    words = f"{kind}_{implements}" if implements else kind
    return PREFIX + re.sub(r"[^A-Z0-9]", "_", words.upper())


def find(name: str, request: Request, candidates: list[Impl]) -> Impl | None:
    """The candidate with this full name or with this variant of the interface asked for."""
    names = (name, f"{request.implements}.{name}")
    return next((impl for impl in candidates if impl.name in names), None)


def _pick(
    request: Request,
    impls: list[Impl],
    special_key: str,
    special: str | None,
    general_key: str,
    general: str | None,
) -> tuple[str, str] | None:
    if special is not None:
        return special_key, special
    if general is None:
        return None
    # A full name given for a whole kind speaks of its own interface only.
    others = {
        i.name for i in impls if i.kind == request.kind and i.implements != request.implements
    }
    return None if general in others else (general_key, general)


def _flatten(table: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _hint(key: str, allowed: Iterable[str]) -> str:
    near = nearest(key, allowed)
    return f"; did you mean {near}?" if near else "; see `k3 plugins impls`"
