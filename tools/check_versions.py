"""Check that every range between the packages accepts the version in the tree.

Usage: python tools/check_versions.py [ROOT]
"""

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement


def main() -> int:
    """Check the tree and return the exit code."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    projects = {path.parent.name: path for path in sorted(root.glob("packages/*/pyproject.toml"))}
    versions = {name: read_version(path.parent) for name, path in projects.items()}
    problems = [
        problem
        for name, path in projects.items()
        for problem in check(name, tomllib.loads(path.read_text()), versions)
    ]
    for problem in problems:
        print(problem)
    shown = ", ".join(f"{name} {version}" for name, version in versions.items())
    print(f"{shown}: {len(problems)} problems")
    return 1 if problems else 0


def read_version(folder: Path) -> str:
    """`__version__` of src/<package>/__about__.py, without importing it."""
    about = folder / "src" / folder.name.replace("-", "_") / "__about__.py"
    match = re.search(r'^__version__ = "([^"]+)"', about.read_text(), flags=re.MULTILINE)
    if match is None:
        raise SystemExit(f'{about}: no line of the form __version__ = "1.2.3"')
    return match.group(1)


def check(name: str, project: dict[str, Any], versions: dict[str, str]) -> list[str]:
    """Problems of one package: its name, and its ranges of the other packages."""
    table = project["project"]
    problems = [] if table["name"] == name else [f"{name}: is called {table['name']!r}"]
    texts = list(table.get("dependencies", ()))
    for extra in table.get("optional-dependencies", {}).values():
        texts += extra
    for requirement in map(Requirement, texts):
        version = versions.get(requirement.name)
        if version is None:
            continue
        if not requirement.specifier:
            problems.append(f"{name}: gives no range for {requirement.name}")
        elif not requirement.specifier.contains(version, prereleases=True):
            problems.append(f"{name}: requires {requirement}, the tree has {version}")
    return problems


if __name__ == "__main__":
    sys.exit(main())
