"""The interpreter's own standard library as text, and which of its files are held out.

It is the corpus that every machine already has (training 4). A file is held out by a hash of its
path inside the library, so the same modules stay unseen across interpreter versions.
"""

import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from k3_core.tasks import is_test

HELD_OUT_PERCENT = 5
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__"})


def root() -> Path:
    """The folder of the standard library of this interpreter."""
    return Path(sysconfig.get_path("stdlib"))


def is_held_out(path: str) -> bool:
    """Whether the file at `path` (relative, with forward slashes) is kept out of training."""
    return is_test(f"stdlib:{path}", HELD_OUT_PERCENT)


def training_files() -> Iterator[tuple[str, str]]:
    """(relative path, text) of every file that a corpus may contain, in the order of the paths."""
    return _texts(name for name in _paths() if not is_held_out(name))


def heldout_files() -> Iterator[tuple[str, str]]:
    """The same of every file that no corpus may contain."""
    return _texts(name for name in _paths() if is_held_out(name))


def _paths() -> list[str]:
    base = root()
    paths = (path.relative_to(base) for path in base.rglob("*.py"))
    return sorted(path.as_posix() for path in paths if SKIPPED_FOLDERS.isdisjoint(path.parts))


def _texts(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Empty files are left out, and those not in UTF-8: they test Python's own tokenizer."""
    for name in names:
        try:
            text = (root() / name).read_bytes().decode()
        except UnicodeDecodeError:
            continue
        if text:
            yield name, text
