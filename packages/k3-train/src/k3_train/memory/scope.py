"""Which policies are in force where: annotated functions, one inside another.

To what a function saves apply its own entry and those of the functions around it, up to one that
hides them. Nothing applies inside a function that runs again: only its inputs are saved.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from k3_train.memory.base import MemoryPolicy
from k3_train.memory.saved import Saver

Policies = tuple[MemoryPolicy, ...]

_in_force: ContextVar[Policies | None] = ContextVar("in_force", default=())
"""Those of the functions that run now; None where none may apply."""


@dataclass(frozen=True)
class Entry:
    """What the table says of a function: a module by its name, or a key `op:NAME`.

    is_exact: nothing that it saves may be rounded.
    """

    name: str
    policies: Policies
    is_exact: bool = False

    def within(self, outer: Policies) -> Policies:
        """The policies that pack what the function saves, in their order."""
        is_hidden = any(policy.hides_outer for policy in self.policies)
        packing = {*(() if is_hidden else outer), *(one for one in self.policies if one.packs)}
        chosen = [one for one in packing if one.is_exact or not self.is_exact]
        return tuple(sorted(chosen, key=lambda one: (one.order, type(one).__qualname__)))


class Scopes:
    """Runs the annotated functions of one model; equal sets of policies share what they pack."""

    def __init__(self) -> None:
        self._savers: dict[Policies, Saver] = {}
        self.unused: dict[str, None] = {}
        """Names of those that were not called yet, in order."""

    def call(self, entry: Entry, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function under its own policies and those around it."""
        self.unused.pop(entry.name, None)
        outer = _in_force.get()
        if outer is None or not torch.is_grad_enabled():
            return function(*args, **kwargs)
        for policy in entry.policies:
            function = partial(policy.call, function)
        inner = entry.within(outer)
        if inner == outer:
            return function(*args, **kwargs)
        if inner not in self._savers:
            self._savers[inner] = Saver(inner)
        with self._savers[inner].hooks():
            return call_under(inner, function, *args, **kwargs)


def call_under(
    policies: Policies | None, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Call a function inside which these are in force."""
    token = _in_force.set(policies)
    try:
        return function(*args, **kwargs)
    finally:
        _in_force.reset(token)
