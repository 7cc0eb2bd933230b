"""The documentation stays true: what it marks as runnable runs, what it names exists.

A code block after `<!-- run -->` is run: Python in this process, one namespace a page; a console
block line by line, where every line shown below a command has to be printed, in that order, and
`...` stands for any lines. A block after `<!-- file: NAME -->` is written to the folder first.
"""

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in (
        "*.md",
        "docs/*.md",
        "examples/*/README.md",
        "packages/*/README.md",
        "packages/*/src/*/assets/*/README.md",
    )
    for path in ROOT.glob(pattern)
)
BLOCK = re.compile(r"^(?:<!-- (run|file: \S+) -->\n)?```(\w+)\n(.*?)^```$", re.M | re.S)
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)|^\[\w+\]: (\S+)$", re.M)
K3 = re.compile(r"(?:^|[\s(])k3 ([a-z].*)")
GROUPS = ("train", "train data", "eval", "plugins", "kernels", "bench")
"""Commands that have subcommands."""


class Block(NamedTuple):
    """A fenced block: its mark ("run", "file: NAME" or empty), language and text."""

    mark: str
    language: str
    text: str


def blocks_of(page: str) -> list[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return [Block(*(part or "" for part in match.groups())) for match in BLOCK.finditer(text)]


def marked(language: str) -> list[str]:
    found = {page for page in PAGES for b in blocks_of(page) if b.mark and b.language == language}
    return sorted(found)


def write_files(page: str, folder: Path) -> None:
    for block in blocks_of(page):
        if block.mark.startswith("file: "):
            (folder / block.mark.removeprefix("file: ")).write_text(block.text, encoding="utf-8")


def environment() -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("K3_")}
    sources = map(str, sorted(ROOT.glob("packages/*/src")))
    return {**kept, "PYTHONPATH": os.pathsep.join(sources), "COLUMNS": "200"}


def shell(command: str, folder: Path) -> str:
    """Output of a command, in which `k3` and `python` are those of this interpreter."""
    names = {"k3": f"'{sys.executable}' -m k3_core.cli.app", "python": f"'{sys.executable}'"}
    prelude = "".join(f'{name}() {{ {run} "$@"; }}\n' for name, run in names.items())
    done = subprocess.run(
        ["bash", "-c", prelude + command],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def sessions(text: str) -> list[tuple[str, list[str]]]:
    """(command, lines shown below it) of a console block."""
    found: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        elif line.strip() != "...":
            found[-1][1].append(line.rstrip())
    return found


def test_there_is_something_to_run() -> None:
    assert {"README.md", "docs/tour.md"} <= set(marked("python"))
    assert {"README.md", "docs/plugins.md"} <= set(marked("console"))


@pytest.mark.parametrize("page", marked("python"))
def test_python_blocks_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_files(page, tmp_path)
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in blocks_of(page):
        if (block.mark, block.language) == ("run", "python"):
            exec(compile(block.text, page, "exec"), namespace)


@pytest.mark.parametrize("page", marked("console"))
def test_console_blocks_print_what_they_show(page: str, tmp_path: Path) -> None:
    write_files(page, tmp_path)
    shown = [b.text for b in blocks_of(page) if (b.mark, b.language) == ("run", "console")]
    for command, expected in (session for text in shown for session in sessions(text)):
        printed = iter(line.rstrip() for line in shell(command, tmp_path).splitlines())
        for line in expected:
            assert line in printed, f"{page}: `{command}` does not print {line!r} in this order"


@cache
def help_of(command: str) -> str:
    return shell(f"k3 {command} --help", ROOT)


def commands_of(page: str) -> list[str]:
    """What follows `k3` in the shell blocks of a page, lines that end in a backslash joined."""
    texts = [b.text for b in blocks_of(page) if b.language in ("bash", "console")]
    lines = "\n".join(texts).replace("\\\n", " ").splitlines()
    return [match[1] for line in lines if (match := K3.search(line.partition(" #")[0]))]


@pytest.mark.parametrize("page", [page for page in PAGES if commands_of(page)])
def test_commands_and_options_exist(page: str) -> None:
    for command in commands_of(page):
        words = command.split()
        name = words.pop(0)
        while name in GROUPS and words and words[0][0] != "-":
            name = f"{name} {words.pop(0)}"
        text = help_of(name)
        for option in (word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)):
            assert re.search(rf"(?<![\w-]){option}(?![\w-])", text), f"{page}: k3 {command}"


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in (first or second for first, second in LINK.findall(text)):
        if "://" not in target:
            assert ((ROOT / page).parent / target).exists(), f"{page}: {target}"


EVALUATIONS = sorted((ROOT / "docs" / "k3-nano").glob("eval-*.txt"))
CARD = "packages/k3-core/src/k3_core/assets/k3-nano/README.md"
PERCENTS = r"[ |]+(\d+\.\d)%" * 3


@pytest.mark.parametrize("path", EVALUATIONS, ids=[path.stem for path in EVALUATIONS])
def test_the_pages_have_the_measured_figures(path: Path) -> None:
    """Rows in the order of the families; the card has every log's bits per byte."""
    measured = path.read_text(encoding="utf-8")
    rows = re.findall(rf"^\w+{PERCENTS}", measured, re.M)
    (bits,) = re.findall(r"^k3-nano +(\d\.\d+)$", measured, re.M)
    (num_bytes,) = re.findall(r"^\d+ held-out files, ([\d,]+) bytes$", measured, re.M)
    readme, card = ((ROOT / page).read_text(encoding="utf-8") for page in ("README.md", CARD))
    assert len(rows) == 4
    assert re.findall(rf"^\| [a-z][^|%]*{PERCENTS}", readme, re.M) == rows
    assert re.findall(rf"^\| [a-z_]+{PERCENTS}", card, re.M) == rows
    assert f"| {num_bytes} | {bits} |" in card


def test_the_card_has_the_sums_of_the_held_out_files() -> None:
    table = (ROOT / "docs" / "k3-nano" / "heldout-files.tsv").read_text(encoding="utf-8")
    rows = [line.split("\t") for line in table.splitlines() if line[0] != "#"][1:]
    copied = [(float(row[4]), int(row[1]), float(row[3])) for row in rows]
    card = (ROOT / CARD).read_text(encoding="utf-8")
    for chosen in (copied, [row for row in copied if row[0] < 0.5]):
        num_bytes = sum(size for _, size, _ in chosen)
        bits = sum(size * per_byte for _, size, per_byte in chosen) / num_bytes
        assert f"| {num_bytes:,} | {bits:.3f} |" in card


def test_the_readme_has_the_bits_per_byte_of_the_card() -> None:
    readme, card = ((ROOT / page).read_text(encoding="utf-8") for page in ("README.md", CARD))
    rows = re.findall(r"^\| [^|]*(?:78|near copies)[^|]*\| [\d,]+ \|(.*)\|$", card, re.M)
    (whole, partial) = (re.findall(r"\d\.\d{3}", row) for row in rows)
    text = " ".join(readme.split())
    assert f"{whole[0]} bits per byte (gzip -9: {whole[1]}, xz -9e: {whole[2]})" in text
    assert f"without those it is {partial[0]} ({partial[1]}, {partial[2]})" in text
