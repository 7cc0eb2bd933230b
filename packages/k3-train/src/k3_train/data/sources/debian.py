"""Documentation of installed Debian packages: prose, manuals, dictionaries."""

import gzip
import re
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

from k3_core.errors import K3Error, nearest
from k3_train.data.documents import Document

LISTS = Path("/var/lib/dpkg/info")
"""Where dpkg keeps the paths of each installed package, one `PACKAGE.list` each."""
FOLDERS = (
    "/usr/share/doc/",
    "/usr/share/man/man",
    "/usr/share/dictd/",
    "/usr/share/games/fortunes/",
)
MANUALS = "/share/man/"
PLAIN = frozenset({"", ".txt", ".md", ".rst", ".html", ".dict", *(f".{n}" for n in range(1, 9))})
SKIPPED = frozenset({"copyright", "changelog", "changelog.debian"})
MAX_BYTES = 1 << 26


@dataclass(frozen=True)
class DebianSource:
    """Text files of installed packages, by package and path; HTML and manual pages as plain text.

    packages: names as dpkg has them; empty for all that are installed. Changelogs and licences
    are left out: they are much alike. lists: dpkg's folder of file lists.
    """

    packages: tuple[str, ...] = ()
    lists: str = str(LISTS)

    def entries(self) -> Iterator[Document]:
        """One document a file, named by its path. K3Error for a package that is not installed."""
        for package in self._chosen():
            for line in (Path(self.lists) / f"{package}.list").read_text().splitlines():
                path = Path(line)
                if line.startswith(FOLDERS) and _is_text(path) and path.is_file():
                    data = _read(path)
                    if data is not None:
                        yield Document(_plain_name(path), data)

    def _chosen(self) -> list[str]:
        known = {path.stem.partition(":")[0]: path.stem for path in Path(self.lists).glob("*.list")}
        if not known:
            raise K3Error(
                f"{self.lists} has no list of a package: source `debian` reads what dpkg installed "
                "on this machine; use `stdlib`, `packages` or `local` here"
            )
        for name in self.packages:
            if name not in known:
                close = nearest(name, known)
                hint = f", did you mean {close!r}?" if close else ""
                raise K3Error(f"Debian package {name!r} is not installed{hint}: apt install {name}")
        return [known[name] for name in self.packages or sorted(known)]


def _is_text(path: Path) -> bool:
    name = path.name.removesuffix(".gz").removesuffix(".dz")
    return Path(name).suffix in PLAIN and name.lower() not in SKIPPED


def _plain_name(path: Path) -> str:
    return f"{path.as_posix().removesuffix('.gz').removesuffix('.dz').lstrip('/')}.txt"


def _read(path: Path) -> bytes | None:
    """The text, None for an empty, unreadable or too large file."""
    try:
        with gzip.open(path) if path.suffix in (".gz", ".dz") else path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except (OSError, EOFError):
        return None
    if not data or len(data) > MAX_BYTES:
        return None
    if ".html" in path.suffixes:
        return html_text(data.decode("utf-8", "replace")).encode()
    if MANUALS in path.as_posix():
        return manual_text(data.decode("utf-8", "replace")).encode()
    return data


class _Text(HTMLParser):
    """Collects what a page shows."""

    hidden = frozenset({"script", "style", "head"})
    blocks = frozenset({"p", "div", "li", "tr", "pre", "h1", "h2", "h3", "h4", "br", "dt", "dd"})

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.depth = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.depth += tag in self.hidden
        self.parts.append("\n" if tag in self.blocks else "")

    def handle_endtag(self, tag: str) -> None:
        self.depth -= tag in self.hidden and self.depth > 0
        self.parts.append("\n" if tag in self.blocks else "")

    def handle_data(self, data: str) -> None:
        if not self.depth:
            self.parts.append(data)


def html_text(page: str) -> str:
    """What a page shows as text, at most one empty line between blocks."""
    parser = _Text()
    parser.feed(page)
    parser.close()
    return _squeeze("".join(parser.parts))


ESCAPES = (
    (re.compile(r"\\f(?:\[\w*\]|\(..|.)"), ""),
    (re.compile(r"\\-"), "-"),
    (re.compile(r"\\\((?:aq|cq)"), "'"),
    (re.compile(r"\\\((?:lq|rq)"), '"'),
    (re.compile(r"\\\(em"), "-"),
    (re.compile(r"\\s[-+]?\d+|\\\*\([LR]q|\\\*[(\[]?\w|\\[&|^/,%:c]"), ""),
    (re.compile(r"\\e"), r"\\"),
)
SHOWN = re.compile(r"\.(?:SH|SS|B|I|BR|RB|BI|IR|IP|TP|Nm|Sh|Ss|Nd|Ar|Fl|Dq|Sq|UR|MT)\b ?(.*)")


def manual_text(page: str) -> str:
    """Text of a manual page: macros that show something lose their name, the others their line."""
    lines = []
    for line in page.splitlines():
        if line.startswith((".", "'")):
            shown = SHOWN.fullmatch(line)
            line = shown[1].replace('"', "") if shown else ""
        for pattern, replacement in ESCAPES:
            line = pattern.sub(replacement, line)
        lines.append(line)
    return _squeeze("\n".join(lines))


def _squeeze(text: str) -> str:
    lines = (line.rstrip() for line in text.splitlines())
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"
