"""What the packages ask of an environment: no caps, no build-time torch, nothing undeclared."""

import ast
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
DISTRIBUTIONS = {"PIL": "pillow"}
OURS = {package.name.replace("-", "_") for package in PACKAGES}
per_package = pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)


def _project(package: Path) -> dict[str, Any]:
    return tomllib.loads((package / "pyproject.toml").read_text())


def _required(package: Path, extras: bool = True) -> dict[str, Requirement]:
    table = _project(package)["project"]
    texts = list(table["dependencies"])
    for extra in table.get("optional-dependencies", {}).values() if extras else ():
        texts += extra
    return {requirement.name: requirement for requirement in map(Requirement, texts)}


@per_package
def test_torch_is_neither_pinned_nor_capped_nor_needed_to_build(package: Path) -> None:
    for name in ("torch", "numpy", "safetensors", "tokenizers"):
        requirement = _required(package).get(name)
        operators = {spec.operator for spec in requirement.specifier} if requirement else set()
        assert operators <= {">="}, f"{name}{requirement and requirement.specifier}"
    assert _project(package)["build-system"]["requires"] == ["hatchling>=1.26"]


@per_package
def test_heavy_libraries_are_never_required(package: Path) -> None:
    assert not {"ray", "triton", "transformers"} & set(_required(package, extras=False))


@per_package
def test_every_third_party_import_is_declared(package: Path) -> None:
    declared = {name.lower().replace("-", "_") for name in _required(package)}
    own = package.name.replace("-", "_")
    undeclared = {
        f"{path.relative_to(package)}: {name}"
        for path in sorted(package.glob("src/**/*.py"))
        for name in _imported(ast.parse(path.read_text(encoding="utf-8")))
        if name not in sys.stdlib_module_names
        and name != own
        and DISTRIBUTIONS.get(name, name).lower() not in declared
    }
    assert not undeclared, "\n".join(sorted(undeclared))


def _imported(tree: ast.Module) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


@per_package
def test_requirements_dev_installs_every_package(package: Path) -> None:
    lines = (ROOT / "requirements-dev.txt").read_text().splitlines()
    assert f"-e packages/{package.name}" in [line.partition("[")[0] for line in lines]


def test_the_constraints_satisfy_the_requirements() -> None:
    lines = (ROOT / "requirements" / "constraints.txt").read_text().splitlines()
    pins = dict(re.fullmatch(r"([\w-]+)==([\w.]+)", x).groups() for x in lines if x[0] != "#")  # type: ignore[union-attr, misc]
    assert pins["torch"] == "2.13.0"
    for package in PACKAGES:
        for name, requirement in _required(package).items():
            if name.replace("-", "_") not in OURS:
                assert name in pins, f"{package.name} requires {name}, which has no pin"
                assert requirement.specifier.contains(pins[name])
