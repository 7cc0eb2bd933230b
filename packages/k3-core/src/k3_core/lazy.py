"""Names of a package that are imported on first use, so that importing the package is cheap."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy_attributes(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """A module-level `__getattr__` that finds each name in the module given for it.

    Use: `__getattr__ = lazy_attributes(__name__, {"Thing": "package.thing"})`.
    """

    def __getattr__(name: str) -> Any:
        if name not in modules:
            known = ", ".join(sorted(modules))
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {known}")
        return getattr(importlib.import_module(modules[name]), name)

    return __getattr__
