"""Python code that every machine already has: the standard library, installed packages."""

import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path

from k3_core.errors import K3Error, nearest
from k3_core.evaluate import stdlib
from k3_train.data.documents import Document

PYTHON_SUFFIXES = (".py", ".pyi")


@dataclass(frozen=True)
class StdlibSource:
    """The training files of this interpreter's standard library, in the order of the paths."""

    def entries(self) -> Iterator[Document]:
        """One document a file; the held-out files are left out."""
        return (Document(name, text.encode()) for name, text in stdlib.training_files())

    def describe(self) -> dict[str, object]:
        """The interpreter's version."""
        return {"python": platform.python_version()}


@dataclass(frozen=True)
class PackagesSource:
    """Python files of installed distributions, by distribution and path.

    names: distributions, normalised as pip prints them; empty for all that are installed.
    """

    names: tuple[str, ...] = ()

    def entries(self) -> Iterator[Document]:
        """One document a file, named `distribution/path`; K3Error for a name not installed."""
        for name, one in self._chosen().items():
            for path in sorted(one.files or (), key=str):
                file = Path(str(one.locate_file(path)))
                if path.suffix in PYTHON_SUFFIXES and file.is_file():
                    yield Document(f"{name}/{path.as_posix()}", file.read_bytes())

    def describe(self) -> dict[str, object]:
        """The versions."""
        return {"versions": {name: one.version for name, one in self._chosen().items()}}

    def _chosen(self) -> dict[str, Distribution]:
        found = {_normal(one.metadata["Name"]): one for one in distributions()}
        wanted = [_normal(name) for name in self.names] or sorted(found)
        for name in wanted:
            if name not in found:
                close = nearest(name, found)
                raise K3Error(
                    f"distribution {name!r} is not installed"
                    + (f"; did you mean {close!r}?" if close else ".")
                    + " `pip list` shows what is"
                )
        return {name: found[name] for name in wanted}


def _normal(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")
