"""Where plugins come from: entry points, first-party modules of a checkout, and named files.

Discovery imports nothing of a plugin; it lists `Source` objects in a fixed order.
Source: design 3 (registry).
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType

from k3_core.errors import PluginError

GROUP = "k3"
FIRST_PARTY = ("k3_core", "k3_kernels", "k3_train", "k3_rl", "k3_serve", "k3_agentenv")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A plugin that was found but not yet imported."""

    name: str
    distribution: str
    version: str
    origin: str
    load: Callable[[], ModuleType]

    @property
    def is_first_party(self) -> bool:
        """Whether it is ours: the name and the distribution are those of a K3 package."""
        return self.name in FIRST_PARTY and self.distribution.replace("-", "_") == self.name

    def sort_key(self) -> tuple[bool, str, str]:
        """First-party plugins first, so that nobody else can take their names."""
        return not self.is_first_party, self.distribution, self.name


@dataclass(frozen=True, slots=True)
class Settings:
    """`K3_PLUGINS` (allowed names and files), `K3_PLUGINS_BLOCK` and `K3_PLUGINS_STRICT`."""

    allowed: frozenset[str]
    files: tuple[str, ...]
    blocked: frozenset[str]
    is_restricted: bool
    is_strict: bool

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> "Settings":
        """Read the three variables; an empty variable is the same as an absent one."""
        items = _split(environ.get("K3_PLUGINS", ""))
        files = tuple(item for item in items if item.endswith(".py") or os.sep in item)
        return cls(
            allowed=frozenset(items) - frozenset(files),
            files=files,
            blocked=frozenset(_split(environ.get("K3_PLUGINS_BLOCK", ""))),
            is_restricted=bool(items),
            is_strict=environ.get("K3_PLUGINS_STRICT", "0") not in ("", "0"),
        )

    def reason_to_block(self, source: Source) -> str:
        """Why the settings keep a plugin out, or an empty string. k3_core is never kept out."""
        if source.name == "k3_core" and source.is_first_party:
            return ""
        if source.name in self.blocked:
            return "named in K3_PLUGINS_BLOCK"
        is_file = source.origin.startswith("file ")
        if self.is_restricted and not (source.is_first_party or is_file):
            return "" if source.name in self.allowed else "not named in K3_PLUGINS"
        return ""


def discover(settings: Settings) -> list[Source]:
    """Every plugin in a fixed order: first-party ones, then by (distribution, name), then files."""
    found = [_from_entry_point(entry) for entry in entry_points(group=GROUP)]
    known = {source.name for source in found if source.is_first_party}
    found += [s for name in FIRST_PARTY if name not in known and (s := _from_checkout(name))]
    found.sort(key=Source.sort_key)
    return found + [_from_file(path) for path in settings.files]


def _split(value: str) -> list[str]:
    return [item.strip() for item in value.split(",") if item.strip()]


def _from_entry_point(entry: EntryPoint) -> Source:
    def load() -> ModuleType:
        module = entry.load()
        package = entry.value.partition(":")[0].partition(".")[0]
        if entry.name != package:
            raise PluginError(
                f"entry point {entry.name!r} must have the import name of its package, "
                f"{package!r}; rename it in the plugin's pyproject.toml"
            )
        if not isinstance(module, ModuleType):
            raise PluginError(f"entry point {entry.value!r} is not a module; name a module")
        return module

    distribution = entry.dist.name if entry.dist else "unknown"
    version = entry.dist.version if entry.dist else "unknown"
    return Source(
        name=entry.name,
        distribution=distribution,
        version=version,
        origin=f"entry point {entry.value}",
        load=load,
    )


def _from_checkout(package: str) -> Source | None:
    """A first-party package on `PYTHONPATH` that has no installed metadata."""
    spec = importlib.util.find_spec(package)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    if not any((Path(folder) / "plugin.py").is_file() for folder in folders):
        return None
    return Source(
        name=package,
        distribution=package.replace("_", "-"),
        version="checkout",
        origin=f"checkout {folders[0]}",
        load=lambda: importlib.import_module(f"{package}.plugin"),
    )


def _from_file(item: str) -> Source:
    path = Path(item).expanduser().resolve()
    folder, parts = path.parent, [path.stem]
    while (folder / "__init__.py").is_file():
        parts.insert(0, folder.name)
        folder = folder.parent
    return Source(
        name=parts[0],
        distribution=f"file {path.name}",
        version="file",
        origin=f"file {path}",
        load=lambda: _import_file(path, folder, ".".join(parts)),
    )


def _import_file(path: Path, folder: Path, module_name: str) -> ModuleType:
    """Import a file under its dotted name, so that its targets resolve like installed ones.

    The folder goes to the end of the search path: a file never hides an installed module.
    """
    if not path.is_file():
        raise PluginError(f"K3_PLUGINS names {str(path)!r}, which is not a file")
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    module = importlib.import_module(module_name)
    if module.__file__ is None or Path(module.__file__).resolve() != path:
        raise PluginError(
            f"{path.name} has the import name {module_name!r}, which is already that of "
            f"{module.__file__ or 'a built-in module'}; rename the file"
        )
    return module
