"""Preparation of text before byte pair encoding (architecture 7, "Long inputs are cut")."""

import re
from collections.abc import Iterator

MAX_CHARS = 400_000
MAX_RUN_CHARS = 25_000
_RUN = re.compile(r"\s+|\S+")
_SURROGATE = re.compile("[\ud800-\udfff]")


def join_surrogates(text: str) -> str:
    """Replace each surrogate pair by its character and each lone surrogate by U+FFFD.

    A lone surrogate (JSON can spell one) has no UTF-8 form; the released tokenizer encodes the
    replacement character for it, as reading the text as UTF-16 does.
    """
    if not _SURROGATE.search(text):
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def cut_long(text: str) -> Iterator[str]:
    """Pieces that are encoded on their own: at most 400,000 characters, and no run of more than
    25,000 whitespace or 25,000 non-whitespace characters. Joined they are the text."""
    for start in range(0, len(text), MAX_CHARS):
        yield from _cut_runs(text[start : start + MAX_CHARS])


def _cut_runs(text: str) -> Iterator[str]:
    if len(text) <= MAX_RUN_CHARS:
        yield text
        return
    start = 0
    for run in _RUN.finditer(text):
        for cut in range(run.start() + MAX_RUN_CHARS, run.end(), MAX_RUN_CHARS):
            yield text[start:cut]
            start = cut
    yield text[start:]
