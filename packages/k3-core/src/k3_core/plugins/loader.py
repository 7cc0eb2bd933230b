"""Load the discovered plugins one by one; what fails is recorded and does not stop the rest.

Source: design 3 (registry). pluggy validates and calls the hooks; its own loader is not used,
because there one plugin that does not import stops all of them.
"""

import os
import sys
import time
import traceback
from collections.abc import Mapping
from types import FunctionType, ModuleType

import pluggy

from k3_core.errors import DuplicateName, PluginError, one_line
from k3_core.plugins.discover import Settings, Source, discover
from k3_core.plugins.registry import Registry
from k3_core.plugins.spec import PROJECT, K3Spec
from k3_core.plugins.types import API_VERSION, KINDS, Impl, PluginRecord, PluginState


class _Incompatible(PluginError):
    """Written for another version of the contract."""


def load_plugins(environ: Mapping[str, str] = os.environ) -> Registry:
    """Discover and load every plugin; the result does not depend on earlier calls.

    Raises `PluginError` when `K3_PLUGINS_STRICT=1` and a plugin is not in order.
    """
    settings = Settings.from_environ(environ)
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(K3Spec)
    registry = Registry(manager)
    for source in discover(settings):
        record = PluginRecord(
            name=source.name,
            distribution=source.distribution,
            version=source.version,
            source=source.origin,
        )
        reason = settings.reason_to_block(source)
        if reason:
            record.state, record.error = PluginState.BLOCKED, reason
        else:
            _load_one(source, record, registry)
        registry.records.append(record)
    _report_missing(settings, registry)
    if settings.is_strict:
        _raise_if_any_failed(registry)
    return registry


def _load_one(source: Source, record: PluginRecord, registry: Registry) -> None:
    had_torch = "torch" in sys.modules
    start = time.perf_counter()
    try:
        if registry.manager.has_plugin(record.name):
            raise DuplicateName(
                f"the name {record.name!r} is taken by an earlier plugin; "
                f"uninstall one of the two distributions"
            )
        module = source.load()
        record.imports_torch = isinstance(vars(module).get("torch"), ModuleType)
        record.hooks = _hook_names(module, registry.manager)
        impls = _register(module, record.name, registry)
        record.num_impls = len(impls)
        _check_api(impls, record)
    except (Exception, SystemExit) as error:
        record.state = _state_of(error)
        record.error = one_line(error)
        record.traceback = traceback.format_exc()
    record.load_seconds = time.perf_counter() - start
    record.imports_torch |= "torch" in sys.modules and not had_torch


def _state_of(error: BaseException) -> PluginState:
    if isinstance(error, _Incompatible):
        return PluginState.INCOMPATIBLE
    return PluginState.DUPLICATE if isinstance(error, DuplicateName) else PluginState.BROKEN


def _hook_names(module: ModuleType, manager: pluggy.PluginManager) -> tuple[str, ...]:
    """The hooks that a module implements; unknown or undecorated `k3_` functions are errors."""
    names = []
    for name, value in vars(module).items():
        if not isinstance(value, FunctionType):
            continue
        options = manager.parse_hookimpl_opts(module, name)
        if options is None:
            if name.startswith("k3_") and value.__module__ == module.__name__:
                raise PluginError(f"function {name!r} lacks the decorator k3_core.plugins.hookimpl")
            continue
        hook = options.get("specname") or name
        if not hasattr(K3Spec, hook):
            if options.get("optionalhook"):
                continue
            raise _Incompatible(
                f"unknown hook {hook!r}; this core (contract {API_VERSION}) has "
                f"{', '.join(sorted(n for n in vars(K3Spec) if n.startswith('k3_')))}"
            )
        names.append(hook)
    return tuple(sorted(names))


def _register(module: ModuleType, name: str, registry: Registry) -> list[Impl]:
    """Make one plugin known and take its declarations; after an error nothing of it is left."""
    try:
        registry.manager.register(module, name=name)
        impls = _collect(module, registry.manager)
        registry.add(impls, name)
    except BaseException:
        registry.manager.unregister(module, name)
        raise
    return impls


def _collect(module: ModuleType, manager: pluggy.PluginManager) -> list[Impl]:
    """Call the declaring hooks of one plugin and check what they return."""
    impls: list[Impl] = []
    for kind in KINDS:
        hook = f"k3_register_{kind}"
        own = [i for i in getattr(manager.hook, hook).get_hookimpls() if i.plugin is module]
        for impl in (declared for hook_impl in own for declared in hook_impl.function()):
            if not isinstance(impl, Impl):
                raise PluginError(f"{hook} returned {impl!r}; it must return Impl objects")
            if impl.kind != kind:
                raise PluginError(f"{hook} returned {impl.name!r} of kind {impl.kind!r}")
            impls.append(impl)
    return impls


def _check_api(impls: list[Impl], record: PluginRecord) -> None:
    """A plugin of which nothing can run here is incompatible; its rows stay, with the reason."""
    if impls and all(impl.api != API_VERSION for impl in impls):
        wanted = ", ".join(sorted({str(impl.api) for impl in impls}))
        record.state = PluginState.INCOMPATIBLE
        record.error = f"written for plugin contract {wanted}; this core has {API_VERSION}"


def _report_missing(settings: Settings, registry: Registry) -> None:
    """A name in `K3_PLUGINS` that nothing provides is an error, not a wish."""
    names = {record.name for record in registry.records}
    for name in sorted(settings.allowed - names):
        registry.records.append(
            PluginRecord(
                name=name,
                distribution="",
                version="",
                source="K3_PLUGINS",
                state=PluginState.BROKEN,
                error=f"not installed; there are {', '.join(sorted(names))}",
            )
        )


def _raise_if_any_failed(registry: Registry) -> None:
    fine = (PluginState.OK, PluginState.BLOCKED)
    failed = [record for record in registry.records if record.state not in fine]
    if failed:
        lines = "\n".join(f"  {r.name}: {r.state}: {r.error}" for r in failed)
        raise PluginError(
            f"K3_PLUGINS_STRICT is set and {len(failed)} plugin(s) are not in order:\n{lines}\n"
            f"Run `K3_PLUGINS_STRICT=0 k3 plugins doctor`, or add them to K3_PLUGINS_BLOCK."
        )
