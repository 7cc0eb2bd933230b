"""Every row of the tables of public failures that touches a package has tests or a reason."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(ROOT.glob("packages/*/tests/failures.toml"))

SPEC = ROOT.parent / "shared" / "spec"

# Rows of the specification's tables, by package and table; a later table is added with its package.
ROWS = {
    "k3-core": {
        "repository": {1, 2, 4, 5, 7, 8, 10, 11, 13, 14, 16, 17},
        "kernels": {
            *(1, 2, 4, 5, 7, 8, 10, 11, 13, 14, 16, 17, 19, 20, 22, 23, 25, 26, 28, 29),
            *(31, 32, 34, 35, 38, 40),
        },
        "serving": {
            *(1, 2, 4, 5, 10, 11, 13, 14, 16, 19, 20, 22, 23, 26, 32, 34, 40, 43),
            *(50, 52, 53, 55, 61, 62, 65),
        },
    },
    "k3-kernels": {
        "kernels": {
            *(1, 2, 4, 5, 7, 8, 10, 11, 13, 14, 16, 17, 19, 20, 22, 23, 25, 26, 28, 29),
            *(31, 32, 34, 35, 37, 38, 40),
        },
    },
    "k3-serve": {
        "serving": {
            *(1, 2, 4, 5, 7, 8, 10, 11, 13, 14, 16, 17, 19, 20, 22, 23, 25, 28, 29, 31, 35, 37),
            *(38, 41, 43, 44, 46, 47, 49, 50, 52, 53, 55, 56, 58, 59, 61, 62, 64, 65),
        },
    },
    "k3-train": {
        "training": {1, 2, 4, 5, 7, 8, 10, 11, 13, 14, 16, 17, 19, 20, 22, 23, 25, 26, 28, 29},
        "kernels": {37},
    },
}
SECTIONS = {"repository": 4, "kernels": 5, "serving": 5, "training": 5}


def test_every_row_is_listed() -> None:
    listed = {
        path.parents[1].name: {
            table: {int(row) for row in rows}
            for table, rows in tomllib.loads(path.read_text()).items()
        }
        for path in FILES
    }
    assert listed == ROWS


@pytest.mark.skipif(not SPEC.is_dir(), reason="the specification is not beside this checkout")
@pytest.mark.parametrize("table", SECTIONS)
def test_the_packages_together_list_the_rows_of_the_specification(table: str) -> None:
    listed = set().union(*(tables.get(table, set()) for tables in ROWS.values()))
    assert listed == _rows_of_section((SPEC / f"{table}.md").read_text("utf-8"), SECTIONS[table])


def _rows_of_section(text: str, section: int) -> set[int]:
    """The numbers in the first column of the tables between one heading and the next."""
    (body,) = re.findall(rf"^## {section}\. .*?(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    numbers = [int(number) for number in re.findall(r"^\| (\d+) \|", body, re.MULTILINE)]
    assert len(numbers) == len(set(numbers)), "two rows have the same number"
    return set(numbers)


def test_rows_are_read_from_their_section_only() -> None:
    text = "## 1. A\n| 9 | x |\n## 2. B\n| # |\n|---|\n| 1 | x |\n### 2A\n| 3 | y |\n## 3. C\n| 8 |"
    assert _rows_of_section(text, 2) == {1, 3}
    assert _rows_of_section(text, 3) == {8}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.parents[1].name)
def test_every_test_id_exists_and_every_reason_is_a_sentence(path: Path) -> None:
    for table, rows in tomllib.loads(path.read_text()).items():
        for row, tests in rows.items():
            if isinstance(tests, str):
                assert tests.endswith(".") and len(tests) > 20, f"{table} {row}: {tests!r}"
                continue
            assert tests, f"{table} {row} names no test"
            unknown = [test for test in tests if not _exists(test)]
            assert not unknown, f"{table} {row} names {unknown}"


def _exists(test: str) -> bool:
    name, _, function = test.partition("::")
    path = ROOT / name
    if not path.is_file():
        return False
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    return any(isinstance(n, functions) and n.name == function for n in ast.walk(tree))


def test_an_unknown_test_id_is_found() -> None:
    assert _exists("tests/architecture/test_failures.py::test_every_row_is_listed")
    assert not _exists("tests/architecture/test_failures.py::test_nothing")
    assert not _exists("tests/architecture/absent.py::test_every_row_is_listed")
