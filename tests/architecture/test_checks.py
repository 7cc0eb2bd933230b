"""The checks of `.ci/run` hold for the tree, and each of them finds what it is there for."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _tool(name: str, root: Path) -> tuple[int, str]:
    script = ROOT / "tools" / f"{name}.py"
    done = subprocess.run(
        [sys.executable, str(script), "."], cwd=root, capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("tool", ["check_style", "check_versions"])
def test_the_tree_is_in_order(tool: str) -> None:
    code, output = _tool(tool, ROOT)
    assert code == 0, output


def test_import_contracts_hold() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    if not lint.is_file():
        pytest.skip("import-linter is not installed in this environment")
    done = subprocess.run([str(lint), "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('"""A."""\n' + "x = 1\n" * 400, "401 lines, the cap is 400"),
        ("x = 1\n", "no module docstring"),
        ('"""A."""\nimport pickle\n', "imports pickle"),
        ('"""A."""\nfrom pickle import loads\n', "imports pickle"),
        ('"""A."""\ndef f(x) -> None: ...\n', "f has no type for x"),
        ('"""A."""\nclass A:\n    def f(self, *a: int): ...\n', "f has no type for the result"),
        ('"""A."""\ndef _f() -> None:\n' + "    x = 1\n" * 60, "_f has 61 lines"),
        ('"""A."""\n' + "x = 1\n" * 125, "median file of 126 lines, at most 120"),
    ],
)
def test_the_style_check_finds(tmp_path: Path, text: str, problem: str) -> None:
    folder = tmp_path / "packages" / "k3-x" / "src"
    folder.mkdir(parents=True)
    (folder / "module.py").write_text(text)
    code, output = _tool("check_style", tmp_path)
    assert code == 1
    assert problem in output


@pytest.mark.parametrize(
    ("package", "decorator", "num_lines", "problem"),
    [
        ("k3_kernels", "triton.jit", 499, ""),
        ("k3_kernels", "gluon.jit", 499, ""),
        ("k3_kernels", "triton.jit", 501, "501 lines, the cap is 500"),
        ("k3_kernels", "other.jit", 120, "kernel has no type for x, SIZE, the result"),
        ("k3_x", "triton.jit", 120, "kernel has 118 lines, the cap is 60"),
    ],
)
def test_kernels_may_be_long_and_untyped(
    tmp_path: Path, package: str, decorator: str, num_lines: int, problem: str
) -> None:
    folder = tmp_path / "packages" / "k3-x" / "src" / package
    folder.mkdir(parents=True)
    head = f'"""A."""\n@{decorator}\ndef kernel(x, SIZE):\n'
    (folder / "module.py").write_text(head + "    x = 1\n" * (num_lines - 3))
    for name in "abc":  # the median file is a short one
        (folder / f"{name}.py").write_text('"""A."""\n')
    code, output = _tool("check_style", tmp_path)
    assert code == bool(problem)
    assert problem in output


@pytest.mark.parametrize(
    ("requirement", "code"),
    [("k3-a>=0.1,<0.2", 0), ("k3-a>=0.2", 1), ("k3-a", 1), ("numpy", 0)],
)
def test_the_version_check_finds(tmp_path: Path, requirement: str, code: int) -> None:
    for name, dependencies in (("k3-a", "[]"), ("k3-b", f'["{requirement}"]')):
        folder = tmp_path / "packages" / name
        source = folder / "src" / name.replace("-", "_")
        source.mkdir(parents=True)
        (source / "__about__.py").write_text('__version__ = "0.1.3"\n')
        project = f'[project]\nname = "{name}"\ndependencies = {dependencies}\n'
        (folder / "pyproject.toml").write_text(project)
    assert _tool("check_versions", tmp_path)[0] == code
