"""Token files: memory-mapped tokens, an optional loss mask and document offsets (training 4).

A token file is a folder: `manifest.json` (format, dtype, counts, sha256 of every part, sources,
vocabulary), `tokens.bin` (uint16 or uint32), `documents.bin` (uint64, `num_documents + 1` offsets
into the tokens) and, when some targets carry no loss, `mask.bin` (uint8, 1 = loss on predicting
this token).
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from k3_core.errors import K3Error

FORMAT = "k3-tokens/1"
MANIFEST = "manifest.json"
DTYPES = ("uint16", "uint32")


@dataclass(frozen=True)
class TokenFile:
    """An opened token file. Arrays are read-only memory maps."""

    path: Path
    manifest: Mapping[str, Any]
    tokens: npt.NDArray[np.unsignedinteger]
    mask: npt.NDArray[np.uint8] | None
    documents: npt.NDArray[np.int64]

    @classmethod
    def open(cls, path: str | Path) -> "TokenFile":
        """Map the folder `path`; sizes are checked here, contents by `verify`."""
        path = Path(path)
        if not (path / MANIFEST).is_file():
            raise K3Error(
                f"{path} is not a token file: it has no {MANIFEST}; build one with "
                "`k3 train data build`"
            )
        manifest = json.loads((path / MANIFEST).read_text())
        if manifest.get("format") != FORMAT or manifest.get("dtype") not in DTYPES:
            raise K3Error(
                f"{path}/{MANIFEST} has format {manifest.get('format')!r} and dtype "
                f"{manifest.get('dtype')!r}; this version reads {FORMAT!r} with dtype "
                f"{' or '.join(DTYPES)}: build the file again"
            )
        num_tokens, num_documents = manifest["num_tokens"], manifest["num_documents"]
        tokens = _map(path / "tokens.bin", manifest["dtype"], num_tokens)
        documents = _map(path / "documents.bin", "uint64", num_documents + 1).astype(np.int64)
        has_mask = "mask.bin" in manifest["sha256"]
        mask = _map(path / "mask.bin", "uint8", num_tokens) if has_mask else None
        return cls(path, manifest, tokens, mask, documents)

    @property
    def num_tokens(self) -> int:
        """Tokens in the file."""
        return int(self.documents[-1])

    @property
    def num_documents(self) -> int:
        """Documents in the file."""
        return len(self.documents) - 1

    def document(self, index: int) -> list[int]:
        """The token ids of one document."""
        start, stop = self.documents[index : index + 2]
        return [int(token) for token in self.tokens[start:stop]]

    def verify(self) -> None:
        """Compare the sha256 of every part with the manifest."""
        for name, expected in self.manifest["sha256"].items():
            found = _sha256(self.path / name)
            if found != expected:
                raise K3Error(
                    f"{self.path / name} has sha256 {found}, the manifest says "
                    f"{expected}: the file was damaged or changed, build it again"
                )


class TokenFileWriter:
    """Streams documents into a token file that appears under its name only when complete.

    Use as a context manager; on an exception nothing is left behind.
    """

    def __init__(
        self, path: str | Path, *, vocab_size: int, has_mask: bool, sources: Mapping[str, Any]
    ) -> None:
        self.path = Path(path)
        self.num_tokens = 0
        self._dtype = np.dtype("uint16" if vocab_size <= 1 << 16 else "uint32")
        self._vocab_size = vocab_size
        self._sources = dict(sources)
        self._offsets = [0]
        self._num_loss = 0
        self._draft = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        self._names = ("tokens.bin", "mask.bin") if has_mask else ("tokens.bin",)
        self._parts: dict[str, BinaryIO] = {}

    def __enter__(self) -> "TokenFileWriter":
        shutil.rmtree(self._draft, ignore_errors=True)
        self._draft.mkdir(parents=True)
        self._parts = {name: (self._draft / name).open("wb") for name in self._names}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for part in self._parts.values():
            part.close()
        if kind is None:
            self._publish()
        else:
            shutil.rmtree(self._draft, ignore_errors=True)

    def add(
        self, tokens: npt.ArrayLike, lengths: Iterable[int], mask: npt.ArrayLike | None = None
    ) -> None:
        """Append documents of `lengths` tokens; `tokens` (and `mask`) hold them end to end."""
        ids = np.asarray(tokens)
        lengths = list(lengths)
        if sum(lengths) != len(ids) or min(lengths, default=1) < 1:
            raise K3Error(
                f"document lengths sum to {sum(lengths)}, but there are {len(ids)} "
                "tokens; every document needs at least one token"
            )
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self._vocab_size:
            raise K3Error(
                f"token ids {ids.min()}..{ids.max()} are outside the vocabulary of "
                f"{self._vocab_size}: use the tokenizer that the file is for"
            )
        if (mask is not None) != ("mask.bin" in self._parts):
            raise K3Error("a mask is given exactly when the file is made with has_mask=True")
        self._parts["tokens.bin"].write(ids.astype(self._dtype).tobytes())
        if mask is not None:
            flags = np.asarray(mask, dtype=np.uint8)
            if flags.shape != ids.shape:
                raise K3Error(f"mask has {len(flags)} entries for {len(ids)} tokens")
            self._parts["mask.bin"].write(flags.tobytes())
            self._num_loss += int(flags.sum())
        else:
            self._num_loss += len(ids)
        for length in lengths:
            self._offsets.append(self._offsets[-1] + length)
        self.num_tokens = self._offsets[-1]

    def _publish(self) -> None:
        (self._draft / "documents.bin").write_bytes(np.asarray(self._offsets, "uint64").tobytes())
        names = (*self._names, "documents.bin")
        manifest = {
            "format": FORMAT,
            "dtype": self._dtype.name,
            "vocab_size": self._vocab_size,
            "num_tokens": self.num_tokens,
            "num_loss_tokens": self._num_loss,
            "num_documents": len(self._offsets) - 1,
            "sha256": {name: _sha256(self._draft / name) for name in names},
            "sources": self._sources,
        }
        (self._draft / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        if self.path.exists():
            if not (self.path / MANIFEST).is_file():
                raise K3Error(f"{self.path} exists and is not a token file: choose another name")
            shutil.rmtree(self.path)
        self._draft.rename(self.path)


def _map(path: Path, dtype: str, count: int) -> npt.NDArray[Any]:
    expected = count * np.dtype(dtype).itemsize
    size = path.stat().st_size if path.is_file() else -1
    if size != expected:
        raise K3Error(
            f"{path} has {max(size, 0)} bytes, the manifest asks for {expected}: "
            "the file was cut off or is missing, build it again"
        )
    if count == 0:
        return np.zeros(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r", shape=(count,))


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
