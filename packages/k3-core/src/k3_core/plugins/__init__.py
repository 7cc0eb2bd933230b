"""The registry: plugins declare implementations, `resolve` chooses one and says why.

Source: design 3. Nothing in this package imports torch.
"""

from k3_core.errors import (
    DuplicateName,
    ImplLoadError,
    ImplUnavailable,
    K3Error,
    PluginError,
    PluginTableMismatch,
)
from k3_core.plugins.loader import load_plugins
from k3_core.plugins.processes import ensure_plugins, list_impls, reload_plugins, table_hash
from k3_core.plugins.registry import Registry
from k3_core.plugins.resolve import resolve
from k3_core.plugins.spec import hookimpl
from k3_core.plugins.types import (
    API_VERSION,
    KINDS,
    Impl,
    PluginRecord,
    PluginState,
    Request,
    Resolution,
)

__all__ = [
    "API_VERSION",
    "KINDS",
    "DuplicateName",
    "Impl",
    "ImplLoadError",
    "ImplUnavailable",
    "K3Error",
    "PluginError",
    "PluginRecord",
    "PluginState",
    "PluginTableMismatch",
    "Registry",
    "Request",
    "Resolution",
    "ensure_plugins",
    "hookimpl",
    "list_impls",
    "load_plugins",
    "reload_plugins",
    "resolve",
    "table_hash",
]
