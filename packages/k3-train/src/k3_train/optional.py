"""Libraries that are imported on use: their absence is an error that names the extra."""

import importlib
from typing import Any

from k3_core.errors import K3Error


def require(module: str, extra: str, purpose: str) -> Any:
    """The module `module`; K3Error naming `pip install 'k3-train[extra]'` when it is absent."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise K3Error(
            f"{purpose} needs {module.partition('.')[0]} ({error}): pip install 'k3-train[{extra}]'"
        ) from error
