"""Finds what is wrong with a data file, by line and column (`k3 train data check`)."""

import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from k3_core.errors import K3Error
from k3_train.data.token_file import MANIFEST, TokenFile, token_files
from k3_train.optional import require


@dataclass(frozen=True)
class Problem:
    """What is wrong, what is expected, and where: line and column from 1, in characters."""

    line: int
    column: int
    found: str
    expected: str

    def __str__(self) -> str:
        return f"{self.line}:{self.column}: {self.found}; expected {self.expected}"


def check_file(path: Path, text_key: str = "text") -> Iterator[Problem]:
    """Problems of a JSONL, Parquet or text file, in order. K3Error when it cannot be read at all.

    A `.gz` file is unpacked on the way.
    """
    if not path.is_file():
        raise K3Error(f"{path} is no file: give a JSONL, Parquet or text file, or a token file")
    suffix = data_suffix(path)
    if suffix == ".parquet":
        yield from _check_parquet(path, text_key)
        return
    check: Callable[[bytes, int], Problem | None] = _check_text
    if suffix == ".jsonl":

        def check(line: bytes, number: int) -> Problem | None:
            found = read_line(line, number, text_key)
            return found if isinstance(found, Problem) else None

    with open_plain(path) as stream:
        for number, line in enumerate(stream, 1):
            problem = check(line, number)
            if problem is not None:
                yield problem


def check_token_files(folder: Path) -> list[str]:
    """Verify the token file `folder`, or each of a data folder; the names of those that hold."""
    is_one = (folder / MANIFEST).is_file()
    files = {folder.name: TokenFile.open(folder)} if is_one else token_files(folder)
    if not files:
        raise K3Error(f"{folder} holds no token file: build one with `k3 train data build`")
    for file in files.values():
        file.verify()
    return list(files)


def read_line(line: bytes, number: int, text_key: str) -> str | Problem:
    """The text of one line of JSONL, or what is wrong with the line."""
    bad = _check_text(line, number)
    if bad is not None:
        return bad
    try:
        row = json.loads(line.decode().rstrip("\r\n"))
    except json.JSONDecodeError as error:
        expected = f"one JSON object a line with the key {text_key!r}"
        return Problem(number, error.pos + 1, error.msg, expected)
    except RecursionError:
        return Problem(number, 1, "JSON nested too deeply", "fewer than 1,000 levels")
    expected = f"an object with a string under {text_key!r}"
    if not isinstance(row, dict):
        return Problem(number, 1, f"a JSON {_json_type(row)}", expected)
    if text_key not in row:
        keys = ", ".join(sorted(map(repr, row))) or "none"
        return Problem(number, 1, f"no key {text_key!r}, the keys are {keys}", expected)
    text = row[text_key]
    if not isinstance(text, str):
        where = max(line.decode().find(json.dumps(text_key)), 0) + 1
        return Problem(number, where, f"{text_key!r} is a JSON {_json_type(text)}", expected)
    lone = next((i for i, c in enumerate(text) if "\ud800" <= c <= "\udfff"), None)
    if lone is not None:
        found = f"character {lone} of the text is half of a surrogate pair"
        return Problem(number, 1, found, "text that UTF-8 can write")
    return text


def data_suffix(path: Path) -> str:
    """The suffix that says what a file is: lower case, that below `.gz` when there is one."""
    return Path(path.name.removesuffix(".gz")).suffix.lower()


def open_plain(path: Path) -> IO[bytes]:
    """Open a file for reading; `.gz` is unpacked on the way."""
    return cast("IO[bytes]", gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


def _check_text(line: bytes, number: int) -> Problem | None:
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        column = len(line[: error.start].decode()) + 1
        return Problem(number, column, f"byte 0x{line[error.start]:02x}", "UTF-8")
    at = text.find("\0")
    return Problem(number, at + 1, "a zero byte", "text") if at >= 0 else None


def _check_parquet(path: Path, text_key: str) -> Iterator[Problem]:
    for found in parquet_texts(path, text_key):
        if isinstance(found, Problem):
            yield found


def parquet_texts(path: Path, text_key: str) -> Iterator[str | Problem]:
    """The text of each row of a Parquet file, or what is wrong with the row."""
    for number, text in enumerate(_column(path, text_key), 1):
        if isinstance(text, str):
            yield text
        else:
            yield Problem(number, 1, f"{text_key!r} is {type(text).__name__}", "a string")


def _column(path: Path, name: str) -> Iterator[object]:
    """Values of one column, a few rows at a time. K3Error names the columns that there are."""
    parquet = require("pyarrow.parquet", "parquet", "reading Parquet")
    try:
        table = parquet.ParquetFile(path)
    except (OSError, ValueError) as error:  # pyarrow's errors are of these classes
        raise K3Error(f"{path} is no Parquet file: {error}") from error
    with table:
        known = table.schema_arrow.names
        if name not in known:
            raise K3Error(f"{path} has no column {name!r}, it has {known}: name another text key")
        for batch in table.iter_batches(PARQUET_ROWS, columns=[name]):
            yield from batch.column(0).to_pylist()


PARQUET_ROWS = 256
"""Rows in memory at a time."""


def _json_type(value: object) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")
