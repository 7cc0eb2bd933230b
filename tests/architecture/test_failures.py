"""Every row of the tables of public failures that touches a package has tests or a reason."""

import ast
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(ROOT.glob("packages/*/tests/failures.toml"))

# Rows of the specification's tables, by package and table; a later table is added with its package.
ROWS = {
    "k3-core": {"repository": {1, 2, 4, 5, 7, 8, 10, 11, 13, 14, 16, 17}},
    "k3-train": {
        "training": {1, 2, 4, 5, 7, 8, 10, 11, 13, 14, 16, 17, 19, 20, 22, 23, 25, 26, 28, 29}
    },
}


def test_every_row_is_listed() -> None:
    listed = {
        path.parents[1].name: {
            table: {int(row) for row in rows}
            for table, rows in tomllib.loads(path.read_text()).items()
        }
        for path in FILES
    }
    assert listed == ROWS


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
