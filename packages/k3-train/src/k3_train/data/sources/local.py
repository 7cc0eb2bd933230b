"""Local files: JSON Lines, Parquet, text, each gzipped or not; a folder is read whole."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from k3_core.errors import K3Error
from k3_train.data.check import Problem, data_suffix, open_plain, parquet_texts, read_line
from k3_train.data.documents import Document

MAX_BYTES = 1 << 28
"""Of a file that is one document."""


@dataclass(frozen=True)
class LocalSource:
    """Documents of the file or folder `path`.

    A `.jsonl` file has one object a line, with the text under `text_key`; a `.parquet` file one
    row a document, with the text in the column `text_key`; any other file is one document.
    `.gz` after the suffix is unpacked. suffixes: of the files to take from a folder, such as
    [".md", ".txt"]; empty for all.
    """

    path: str
    text_key: str = "text"
    suffixes: tuple[str, ...] = ()

    def entries(self) -> Iterator[Document]:
        """Documents in the order of paths and lines; K3Error names the file and line at fault."""
        root = Path(self.path)
        if not root.exists():
            raise K3Error(f"path {self.path!r} does not exist: give a file or a folder")
        files = sorted(p for p in root.rglob("*") if p.is_file()) if root.is_dir() else [root]
        wanted = [p for p in files if not self.suffixes or data_suffix(p) in self.suffixes]
        if not wanted:
            raise K3Error(
                f"{self.path} has no file with a suffix of {list(self.suffixes)}; it has "
                f"{sorted({data_suffix(p) for p in files})}"
            )
        for file in wanted:
            name = file.relative_to(root).as_posix() if root.is_dir() else file.name
            yield from self._read(file, name)

    def _read(self, file: Path, name: str) -> Iterator[Document]:
        suffix = data_suffix(file)
        if suffix == ".jsonl":
            yield from self._lines(file, name)
        elif suffix == ".parquet":
            yield from self._rows(file, name)
        else:
            with open_plain(file) as stream:
                data = stream.read(MAX_BYTES + 1)
            if len(data) > MAX_BYTES:
                raise K3Error(f"{file} has more than {MAX_BYTES} bytes: split it into documents")
            yield Document(name.removesuffix(".gz"), data)

    def _lines(self, file: Path, name: str) -> Iterator[Document]:
        with open_plain(file) as stream:
            for number, line in enumerate(stream, 1):
                yield Document(
                    f"{name}:{number}", _text(file, read_line(line, number, self.text_key))
                )

    def _rows(self, file: Path, name: str) -> Iterator[Document]:
        for number, found in enumerate(parquet_texts(file, self.text_key), 1):
            yield Document(f"{name}:{number}", _text(file, found))


def _text(file: Path, found: str | Problem) -> bytes:
    if isinstance(found, Problem):
        raise K3Error(f"{file}:{found}; `k3 train data check {file}` lists all bad lines")
    return found.encode()
