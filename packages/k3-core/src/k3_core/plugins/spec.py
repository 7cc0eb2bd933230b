"""The hooks that a plugin may implement; this file is the documentation of the contract.

A plugin is a module named by an entry point of group `k3` (the name of the entry point is the
import name of its package), or a file named in `K3_PLUGINS`. It decorates plain functions with
`hookimpl`. Declarations return metadata: neither they nor their module import torch.
Source: design 3 (registry).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import pluggy

from k3_core.plugins.types import KINDS, Impl, Request

if TYPE_CHECKING:
    from k3_core.cli.lazy import CommandRegistry

PROJECT = "k3"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class K3Spec:
    """One `k3_register_<kind>` per kind (added below), and the hooks that act."""

    @hookspec(firstresult=True)
    def k3_select(self, request: Request, candidates: Sequence[Impl]) -> Impl | None:
        """Site policy: one of `candidates` (all of them can run), or None to abstain.

        Asked after the argument, the environment and the config, before the automatic choice.
        """

    @hookspec
    def k3_add_commands(self, registry: "CommandRegistry") -> None:
        """Add subcommands of `k3` by `registry.add(name, target="module:attribute", help=...)`."""

    @hookspec
    def k3_info(self) -> Mapping[str, str]:  # type: ignore[empty-body]
        """Lines for `k3 info`: name to value. It must be fast and import no torch."""


def _register_hook(kind: str) -> None:
    def declare(self: K3Spec) -> Iterable[Impl]:
        return ()

    declare.__name__ = f"k3_register_{kind}"
    declare.__doc__ = f"The implementations of kind {kind!r} that this plugin offers."
    setattr(K3Spec, declare.__name__, hookspec(declare))


for _kind in KINDS:
    _register_hook(_kind)
