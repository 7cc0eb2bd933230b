"""Libraries that are imported on use: their absence is an error that names the extra."""

import importlib
from typing import Any

from k3_core.config import ConfigError


def require(module: str, extra: str, needed_by: str) -> Any:
    """The module `module`; ConfigError naming `pip install 'k3-train[extra]'` when it is absent.

    needed_by: the setting or the work that asks for it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            needed_by,
            f"needs {module.partition('.')[0]}, which does not import ({error})",
            f"Install it with `pip install 'k3-train[{extra}]'`.",
        ) from error
