"""The table of implementations that the loaded plugins declare.

Source: design 3 (registry).
"""

import hashlib
import json
import traceback
from collections.abc import Iterable, Iterator

import pluggy

from k3_core.errors import DuplicateName, PluginError, one_line
from k3_core.plugins.types import API_VERSION, Impl, PluginRecord, PluginState, Request


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
                result = hook_impl.function(**accepted)
            except (Exception, SystemExit) as error:
                self.mark_broken(hook_impl.plugin_name, hook, error)
            else:
                yield hook_impl.plugin_name, result

    def mark_broken(self, plugin: str, hook: str, error: BaseException) -> None:
        """Record that a loaded plugin's hook failed."""
        left_out = (PluginState.DUPLICATE, PluginState.BLOCKED)
        *_, record = (r for r in self.records if r.name == plugin and r.state not in left_out)
        record.state = PluginState.BROKEN
        record.error = f"{hook}: {one_line(error)}"
        record.traceback = "".join(traceback.format_exception(error))

    def select(self, request: Request, candidates: tuple[Impl, ...]) -> Impl | None:
        """What the hook `k3_select` of the plugins chooses, None when all abstain.

        Raises `PluginError` when one fails: a site's policy is not to be passed over in silence.
        """
        try:
            return self.manager.hook.k3_select(request=request, candidates=candidates)  # type: ignore[no-any-return]
        except Exception as error:
            hook_impls = self.manager.hook.k3_select.get_hookimpls()
            names = ", ".join(sorted(one.plugin_name for one in hook_impls))
            raise PluginError(
                f"k3_select failed for {request.kind} {request.implements}: {one_line(error)}. "
                f"Plugins with that hook: {names}; leave one out by K3_PLUGINS_BLOCK"
            ) from error

    def table_hash(self) -> str:
        """SHA-256 over the contract version and every declaration, equal in equal processes."""
        rows = [impl.as_dict() for impl in self.impls()]
        text = json.dumps([API_VERSION, rows], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()
