"""`k3 info`: versions, platform, plugins and settings, for a bug report. Imports no torch."""

import argparse
import os
import platform
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from k3_core.__about__ import __version__
from k3_core.cli.table import print_json
from k3_core.errors import K3Error, PluginError, one_line
from k3_core.plugins import API_VERSION, Registry, ensure_plugins, resolve

LIBRARIES = ("torch", "triton", "numpy", "safetensors", "tiktoken", "tokenizers", "pluggy", "typer")
SECRET_WORDS = ("KEY", "TOKEN", "SECRET", "PASSWORD")


def main(arguments: Sequence[str]) -> int:
    """Print versions, platform, plugins and K3_* variables."""
    parser = argparse.ArgumentParser(prog="k3 info", description=main.__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    is_json = parser.parse_args(arguments).json
    report = collect(ensure_plugins())
    if is_json:
        print_json(report)
        return 0
    for section, values in report.items():
        if not isinstance(values, Mapping):
            print(f"{section}: {values}")
            continue
        print(f"{section}:")
        for name, value in values.items():
            print(f"  {name}: {value}")
    return 0


def collect(plugins: Registry) -> dict[str, Any]:
    """The report as JSON values; versions come from the metadata of the distributions."""
    extra: dict[str, str] = {}
    for owner, lines in plugins.call_each("k3_info"):
        if isinstance(lines, Mapping):
            extra |= {f"{owner} {name}": str(value) for name, value in lines.items()}
        else:
            problem = PluginError(f"returned {lines!r}; it must return a mapping")
            plugins.mark_broken(owner, "k3_info", problem)
    return {
        "k3": __version__,
        "python": f"{platform.python_version()} at {sys.executable}",
        "platform": f"{platform.platform()}, {os.cpu_count()} CPUs",
        "libraries": {name: _version(name) for name in LIBRARIES},
        "plugin contract": API_VERSION,
        "plugins": {
            record.name: f"{record.version} {record.state}"
            + (f": {record.error}" if record.error else "")
            for record in plugins.records
        },
        "implementations": f"{len(plugins.impls())}, table {plugins.table_hash()[:12]}",
        "choices on cpu in float32": _choices(plugins),
        "environment": {
            name: _shown(name, value)
            for name, value in sorted(os.environ.items())
            if name.startswith("K3_")
        },
        "more": extra,
    }


def _choices(plugins: Registry) -> dict[str, str]:
    """What is chosen for every interface of which there is more than one implementation."""
    impls = plugins.impls()
    rivals = Counter((impl.kind, impl.implements) for impl in impls)
    choices = {}
    for (kind, name), count in rivals.items():
        if count > 1:
            try:
                resolution = resolve(kind, name, registry=plugins)
                choices[f"{kind} {name}"] = f"{resolution.chosen.name} by {resolution.source}"
            except K3Error as error:
                choices[f"{kind} {name}"] = one_line(error)
    return choices


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"


def _shown(name: str, value: str) -> str:
    return "(hidden)" if any(word in name for word in SECRET_WORDS) else value
