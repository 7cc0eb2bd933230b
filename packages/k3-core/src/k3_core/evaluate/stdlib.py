"""The interpreter's own standard library as text, and which of its files are held out.

It is the corpus that every machine already has (training 4). A file is held out by a hash of its
path inside the library, so the same modules stay unseen across interpreter versions.
"""

import sysconfig
from collections.abc import Iterator
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


def files() -> Iterator[tuple[str, str]]:
    """(relative path, text) of every non-empty UTF-8 `.py` file, in the order of the paths.

    Files in another encoding (they test the tokenizer of Python) are left out.
    """
    base = root()
    paths = {path.relative_to(base).as_posix(): path for path in base.rglob("*.py")}
    for name in sorted(paths):
        if SKIPPED_FOLDERS.isdisjoint(name.split("/")):
            try:
                text = paths[name].read_bytes().decode()
            except UnicodeDecodeError:
                continue
            if text:
                yield name, text


def training_files() -> Iterator[tuple[str, str]]:
    """The part of `files` that a corpus may contain."""
    return ((name, text) for name, text in files() if not is_held_out(name))


def heldout_files() -> Iterator[tuple[str, str]]:
    """The part of `files` that no corpus may contain."""
    return ((name, text) for name, text in files() if is_held_out(name))
