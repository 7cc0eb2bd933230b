"""What must start fast imports no torch, in a process of its own (design 3)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "triton", "ray", "fastapi", "typer", "pydantic", "rich")

RUN = """
import json, sys
from k3_core.cli.app import run
code = run(sys.argv[1:])
print(json.dumps([code, sorted(sys.modules)]), file=sys.stderr)
"""


def _run(*arguments: str, **settings: str) -> tuple[int, set[str], str]:
    """Exit code, the modules that were imported, and what was printed."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("K3_")}
    done = subprocess.run(
        [sys.executable, "-c", RUN, *arguments],
        env={**environment, **settings},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    code, modules = json.loads(done.stderr.splitlines()[-1])
    return code, set(modules), done.stdout


@pytest.mark.parametrize(
    "command",
    [
        "--help",
        "--version",
        "plugins --help",
        "plugins list",
        "plugins impls --json",
        "plugins why attention kda --device cuda --dtype bfloat16",
        "info --json",
    ],
)
def test_fast_commands_import_nothing_heavy(command: str) -> None:
    code, modules, output = _run(*command.split())
    assert code == 0
    assert output
    assert not modules & set(HEAVY)


def test_the_package_and_its_registry_import_nothing_heavy() -> None:
    script = (
        "import sys, k3_core, k3_core.plugins; k3_core.plugins.ensure_plugins(); "
        f"sys.exit(bool(set(sys.modules) & {set(HEAVY)!r}))"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_a_plugin_that_imports_torch_is_listed_with_its_load_time(tmp_path: Path) -> None:
    (tmp_path / "heavy_plugin.py").write_text("import torch\n")
    _, modules, output = _run(
        "plugins", "list", "--json", K3_PLUGINS=str(tmp_path / "heavy_plugin.py")
    )
    assert "torch" in modules
    records = {record["name"]: record for record in json.loads(output)}
    assert records["heavy_plugin"]["imports_torch"] is True
    assert records["k3_core"]["imports_torch"] is False
    assert records["heavy_plugin"]["load_seconds"] > records["k3_core"]["load_seconds"]
