"""What the fields of a declaration must be: a wrong one is refused where its plugin makes it.

Found later, it would stop `resolve` for every implementation of the op, not that plugin alone.
Source: design 3 (registry).
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from k3_core.errors import PluginError

if TYPE_CHECKING:
    from k3_core.plugins.types import Impl

_TEXTS = ("kind", "name", "target", "implements", "summary")
_INTEGERS = ("priority", "api")
_COLLECTIONS = ("devices", "dtypes", "features", "requires")


def check_types(impl: "Impl") -> None:
    """Raise `PluginError` for the first field of another type, naming its value."""
    for names, wanted, text in ((_TEXTS, str, "a string"), (_INTEGERS, int, "an integer")):
        for name in names:
            _require(impl, name, isinstance(getattr(impl, name), wanted), text)
    for name in _COLLECTIONS:
        _require(impl, name, _is_strings(getattr(impl, name)), "a collection of strings")
    pair = impl.min_capability
    is_pair = isinstance(pair, tuple) and [type(one) for one in pair] == [int, int]
    _require(impl, "min_capability", pair is None or is_pair, "None or a pair such as (9, 0)")


def check_requirements(impl: "Impl") -> None:
    """Raise `PluginError` for a requirement that is not of the form of PEP 508."""
    if not impl.requires:
        return
    # Imported here because most implementations require nothing.
    from packaging.requirements import InvalidRequirement, Requirement

    for text in impl.requires:
        try:
            Requirement(text)
        except InvalidRequirement:
            _require(impl, "requires", False, "PEP 508 requirements such as 'triton>=3.6'")


def _require(impl: "Impl", name: str, is_right: bool, allowed: str) -> None:
    if not is_right:
        raise PluginError(f"Impl {impl.name!r}: {name} is {getattr(impl, name)!r}; give {allowed}")


def _is_strings(value: object) -> bool:
    if isinstance(value, str) or not isinstance(value, Iterable):
        return False
    return all(isinstance(one, str) for one in value)
