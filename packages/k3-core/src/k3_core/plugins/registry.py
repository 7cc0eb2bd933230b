"""The table of implementations that the loaded plugins declare.

Source: design 3 (registry).
"""

import hashlib
import json
import traceback
from collections.abc import Iterable, Iterator

import pluggy

from k3_core.errors import DuplicateName
from k3_core.plugins.types import API_VERSION, Impl, PluginRecord, PluginState


class Registry:
    """Records of the plugins, their declarations, and pluggy's manager for the acting hooks."""

    def __init__(self, manager: pluggy.PluginManager) -> None:
        self.manager = manager
        self.records: list[PluginRecord] = []
        self._impls: dict[tuple[str, str], Impl] = {}
        self._owners: dict[tuple[str, str], str] = {}

    def add(self, impls: Iterable[Impl], owner: str) -> None:
        """Add a plugin's declarations, all or none; a name already in its kind is an error."""
        new: dict[tuple[str, str], Impl] = {}
        for impl in impls:
            key = (impl.kind, impl.name)
            if key in self._impls or key in new:
                raise DuplicateName(
                    f"{impl.kind} {impl.name!r} is already declared by "
                    f"{self._owners.get(key, owner)}; give the implementation another name"
                )
            new[key] = impl
        self._impls |= new
        self._owners |= dict.fromkeys(new, owner)

    def impls(self, kind: str | None = None, implements: str | None = None) -> list[Impl]:
        """The declarations of a kind and of an interface, by (kind, interface, name)."""
        chosen = [
            impl
            for impl in self._impls.values()
            if kind in (None, impl.kind) and implements in (None, impl.implements)
        ]
        return sorted(chosen, key=lambda impl: (impl.kind, impl.implements, impl.name))

    def owner(self, impl: Impl) -> str:
        """The name of the plugin that declared an implementation."""
        return self._owners[impl.kind, impl.name]

    def call_each(self, hook: str, **arguments: object) -> Iterator[tuple[str, object]]:
        """Call a hook plugin by plugin, first loaded first: (plugin name, result).

        A plugin whose hook raises is recorded as broken and gives no result.
        """
        for hook_impl in getattr(self.manager.hook, hook).get_hookimpls():
            accepted = {name: arguments[name] for name in hook_impl.argnames}
            try:
                yield hook_impl.plugin_name, hook_impl.function(**accepted)
            except Exception as error:
                record = next(r for r in self.records if r.name == hook_impl.plugin_name)
                record.state = PluginState.BROKEN
                record.error = f"{hook}: {type(error).__name__}: {error}"
                record.traceback = traceback.format_exc()

    def table_hash(self) -> str:
        """SHA-256 over the contract version and every declaration, equal in equal processes."""
        rows = [impl.as_dict() for impl in self.impls()]
        text = json.dumps([API_VERSION, rows], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()
