"""Check the size and typing budgets of design 7; prints each violation, exit code 1 on any.

Usage: python tools/check_style.py [ROOT]
"""

import ast
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MEDIAN_LINES = 120
FILE_LINES = 400
KERNEL_FILE_LINES = 500
FUNCTION_LINES = 60
SOURCES = ("packages/*/src/**/*.py", "tools/*.py", "benchmarks/*.py", "examples/**/*.py")
TESTS = ("packages/*/tests/**/*.py", "tests/**/*.py")
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """One Python file, read and parsed."""

    path: Path
    num_lines: int
    tree: ast.Module

    @property
    def is_kernel(self) -> bool:
        """Kernels and what launches them may be longer: a launch lists an argument a line."""
        return "k3_kernels" in self.path.parts

    @classmethod
    def read(cls, path: Path) -> "Module":
        """Read a file; a syntax error is raised as it is."""
        text = path.read_text(encoding="utf-8")
        return cls(path, len(text.splitlines()), ast.parse(text, str(path)))


def main() -> int:
    """Check the tree and return the exit code."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    sources, tests = _read(root, SOURCES), _read(root, TESTS)
    problems = [problem for module in [*sources, *tests] for problem in file_size(module)]
    problems += [problem for module in sources for problem in check(module)]
    problems += list(medians(root, sources))
    for problem in problems:
        print(problem)
    print(f"{len(sources)} source files, {len(tests)} test files, {len(problems)} problems")
    return 1 if problems else 0


def file_size(module: Module) -> Iterator[str]:
    """A file above its cap."""
    cap = KERNEL_FILE_LINES if module.is_kernel else FILE_LINES
    if module.num_lines > cap:
        yield f"{module.path}: {module.num_lines} lines, the cap is {cap}"


def check(module: Module) -> Iterator[str]:
    """A missing module docstring, long functions, public functions without types, pickle."""
    if module.num_lines and not ast.get_docstring(module.tree):
        yield f"{module.path}:1: no module docstring"
    for node in ast.walk(module.tree):
        if isinstance(node, Function):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES and not module.is_kernel:
                yield f"{module.path}:{node.lineno}: {node.name} has {length} lines, the cap is 60"
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None)]
            if "pickle" in names:
                yield f"{module.path}:{node.lineno}: imports pickle"
    for node in _public_functions(module.tree):
        missing = [] if _is_compiled(node) else _untyped(node)
        if missing:
            yield f"{module.path}:{node.lineno}: {node.name} has no type for {', '.join(missing)}"


def medians(root: Path, sources: list[Module]) -> Iterator[str]:
    """Packages whose median file is too long."""
    packages: dict[str, list[int]] = {}
    for module in sources:
        parts = module.path.relative_to(root).parts
        if parts[0] == "packages":
            packages.setdefault(parts[1], []).append(module.num_lines)
    for package, sizes in packages.items():
        median = statistics.median(sizes)
        if median > MEDIAN_LINES:
            yield f"packages/{package}: median file of {median} lines, at most {MEDIAN_LINES}"


def _read(root: Path, patterns: tuple[str, ...]) -> list[Module]:
    paths = {path for pattern in patterns for path in root.glob(pattern)}
    return [Module.read(path) for path in sorted(paths)]


def _public_functions(tree: ast.Module) -> Iterator[Function]:
    """Functions and methods that can be reached by public names."""
    scopes: list[ast.Module | ast.ClassDef] = [tree]
    while scopes:
        for node in scopes.pop().body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                scopes.append(node)
            is_public = isinstance(node, Function) and (
                not node.name.startswith("_") or node.name == "__init__"
            )
            if is_public:
                yield node  # type: ignore[misc]


def _is_compiled(node: Function) -> bool:
    """Whether Triton or Gluon compiles it, whose arguments have no Python types."""
    decorators = {
        ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)
        for decorator in node.decorator_list
    }
    return bool(decorators & {"triton.jit", "gluon.jit"})


def _untyped(node: Function) -> list[str]:
    arguments = node.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    every += [extra for extra in (arguments.vararg, arguments.kwarg) if extra]
    missing = [a.arg for a in every if a.annotation is None and a.arg not in ("self", "cls")]
    return missing + ([] if node.returns else ["the result"])


if __name__ == "__main__":
    sys.exit(main())
