"""Structural validation: a file whose suffix names a format has to be of that format."""

import json
import tomllib
from collections import Counter
from collections.abc import Callable
from xml.etree import ElementTree

from k3_train.data.clean.truncated import python_error
from k3_train.data.documents import Document

MIN_REGULAR = 0.9
"""Share of the rows of a table that have the usual number of columns."""


def is_malformed(document: Document) -> bool:
    """Whether the document is not what its suffix says; other suffixes pass."""
    check = CHECKS.get(document.suffix)
    return check is not None and not check(document.text)


def _is_json(text: str) -> bool:
    return _parses(json.loads, text)


def _is_toml(text: str) -> bool:
    return _parses(tomllib.loads, text)


def _is_xml(text: str) -> bool:
    return _parses(ElementTree.fromstring, text.encode())


def _is_python(text: str) -> bool:
    return python_error(text) is None


def _is_table(text: str) -> bool:
    lines = [line for line in text.splitlines() if line]
    if not lines or '"' in text:  # a quoted field may hold separators and newlines
        return True
    separator = max(",;\t", key=lines[0].count)
    widths = Counter(line.count(separator) for line in lines)
    return widths.most_common(1)[0][1] >= MIN_REGULAR * len(lines)


def _parses(parse: Callable[..., object], text: str | bytes) -> bool:
    try:
        parse(text)
    except (ValueError, SyntaxError, RecursionError):  # ElementTree.ParseError is a SyntaxError
        return False
    return True


CHECKS: dict[str, Callable[[str], bool]] = {
    ".json": _is_json,
    ".toml": _is_toml,
    ".xml": _is_xml,
    ".svg": _is_xml,
    ".py": _is_python,
    ".pyi": _is_python,
    ".csv": _is_table,
    ".tsv": _is_table,
}
