"""One registry per process, and the check that worker processes see the same one.

A process that starts workers sends `table_hash()`; each worker calls `ensure_plugins(hash)`
before it builds anything. Source: design 3 (registry).
"""

import os
import threading

from k3_core.errors import PluginTableMismatch
from k3_core.plugins.loader import load_plugins
from k3_core.plugins.registry import Registry
from k3_core.plugins.types import Impl

_lock = threading.RLock()
_loaded: dict[int, Registry] = {}


def ensure_plugins(expected_hash: str | None = None) -> Registry:
    """Load the plugins once per process (a forked child loads its own) and return the registry.

    Raises `PluginTableMismatch` when the table differs from that of the parent process.
    """
    with _lock:
        pid = os.getpid()
        if pid not in _loaded:
            registry = load_plugins()
            _loaded.clear()
            _loaded[pid] = registry
        registry = _loaded[pid]
    if expected_hash is not None and registry.table_hash() != expected_hash:
        plugins = ", ".join(f"{r.name} ({r.state})" for r in registry.records)
        raise PluginTableMismatch(
            f"process {pid} sees {len(registry.impls())} implementations from {plugins}: table "
            f"{registry.table_hash()[:12]}, the parent process has {expected_hash[:12]}. Give both "
            f"the same K3_PLUGINS, K3_PLUGINS_BLOCK, PYTHONPATH and working directory."
        )
    return registry


def reload_plugins() -> Registry:
    """Forget this process's registry and load again, after the environment was changed."""
    with _lock:
        _loaded.clear()
        return ensure_plugins()


def table_hash() -> str:
    """The hash of this process's table, to be sent to worker processes."""
    return ensure_plugins().table_hash()


def list_impls(kind: str | None = None, implements: str | None = None) -> list[Impl]:
    """The declared implementations, sorted; nothing is imported."""
    return ensure_plugins().impls(kind, implements)
