"""Plugins written to a temporary folder as installed distributions."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the search path; modules imported from it are forgotten afterwards."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    before, path = set(sys.modules), list(sys.path)
    yield folder
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def one_impl() -> Callable[..., str]:
    """Source of a plugin that declares one kernel for the op `probe`."""

    def source(name: str, **fields: object) -> str:
        given = {"kind": "kernel", "name": name, "target": "math:sqrt", "implements": "probe"}
        arguments = ", ".join(f"{key}={value!r}" for key, value in {**given, **fields}.items())
        return (
            "from k3_core.plugins import Impl, hookimpl\n"
            f"@hookimpl\ndef k3_register_kernel():\n    return [Impl({arguments})]\n"
        )

    return source


@pytest.fixture
def install(site: Path) -> Callable[..., Path]:
    """Write a package with a plugin module, and a distribution whose entry point names it."""

    def write(name: str, source: str, distribution: str = "", entry: str = "") -> Path:
        package = site / name
        package.mkdir(exist_ok=True)
        (package / "__init__.py").touch()
        (package / "plugin.py").write_text(source)
        distribution = distribution or name.replace("_", "-")
        info = site / f"{distribution.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n"
        )
        (info / "entry_points.txt").write_text(f"[k3]\n{entry or name} = {name}.plugin\n")
        return package

    return write
