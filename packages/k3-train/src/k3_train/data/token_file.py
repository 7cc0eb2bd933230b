"""Token files: memory-mapped tokens, an optional loss mask and document offsets (training 4).

A token file is a folder: `manifest.json` (format, dtype, counts, sha256 of every part, sources,
vocabulary), `tokens.bin` (uint16 or uint32), `documents.bin` (uint64, `num_documents + 1` offsets
into the tokens) and, when some targets carry no loss, `mask.bin` (uint8, 1 = loss on predicting
this token). Where the documents have names, `names.jsonl` has `[name, sha256 of the source]` of
each. Pictures are in `images.bin` and `pixels.bin` (`k3_train.data.image_store`). A large file is
in shards (`tokens.00000.bin`, ..., and the mask likewise) that hold whole documents; the manifest
lists their sizes.
"""

import json
import os
import shutil
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from k3_core.errors import K3Error
from k3_train.data.image_store import (
    IMAGES,
    PIXELS,
    EncodedPicture,
    ImageStore,
    ImageStoreWriter,
)
from k3_train.data.shards import ShardedArray, map_array
from k3_train.file_hash import file_sha256

FORMAT = "k3-tokens/1"
MANIFEST = "manifest.json"
NAMES = "names.jsonl"
OFFSETS = "documents.bin"
DTYPES = ("uint16", "uint32")


@dataclass(frozen=True)
class TokenFile:
    """An opened token file. Arrays are read-only memory maps."""

    path: Path
    manifest: Mapping[str, Any]
    tokens: npt.NDArray[np.unsignedinteger] | ShardedArray
    mask: npt.NDArray[np.uint8] | ShardedArray | None
    documents: npt.NDArray[np.int64]
    images: ImageStore

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
        num_documents = manifest["num_documents"]
        tokens = _map_part(path, "tokens", manifest["dtype"], manifest)
        documents = map_array(path / OFFSETS, "uint64", (num_documents + 1,)).astype(np.int64)
        has_mask = any(name.startswith("mask.") for name in manifest["sha256"])
        mask = _map_part(path, "mask", "uint8", manifest) if has_mask else None
        return cls(path, manifest, tokens, mask, documents, ImageStore.open(path, manifest))

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

    def names(self) -> Iterator[tuple[str, str]]:
        """(name, sha256 of the source) of each document; nothing where they have no names."""
        if NAMES in self.manifest["sha256"]:
            with (self.path / NAMES).open(encoding="utf-8") as lines:
                yield from (tuple(json.loads(line)) for line in lines)

    def verify(self) -> None:
        """Compare the sha256 of every part with the manifest, the offsets with its counts."""
        starts = self.documents
        if starts[0] or starts[-1] != self.manifest["num_tokens"] or (np.diff(starts) < 1).any():
            raise K3Error(
                f"{self.path / OFFSETS} must rise from 0 to {self.manifest['num_tokens']}: "
                "the file was damaged or changed, build it again"
            )
        for name, expected in self.manifest["sha256"].items():
            found = file_sha256(self.path / name)
            if found != expected:
                raise K3Error(
                    f"{self.path / name} has sha256 {found}, the manifest says "
                    f"{expected}: the file was damaged or changed, build it again"
                )


def token_files(folder: Path) -> dict[str, TokenFile]:
    """The token files of a data folder, opened, by name and in the order of the names."""
    manifests = sorted(folder.glob(f"*/{MANIFEST}"))
    return {path.parent.name: TokenFile.open(path.parent) for path in manifests}


class TokenFileWriter:
    """Streams documents into a token file that appears under its name only when complete.

    Use as a context manager; on an exception nothing is left behind. A shard is closed by the
    first addition after it has `shard_tokens` tokens; None writes one.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        vocab_size: int,
        has_mask: bool,
        sources: Mapping[str, Any],
        has_names: bool = False,
        has_images: bool = False,
        shard_tokens: int | None = None,
    ) -> None:
        self.path = Path(path)
        self.num_tokens = 0
        self._dtype = np.dtype("uint16" if vocab_size <= 1 << 16 else "uint32")
        self._vocab_size = vocab_size
        self._sources = dict(sources)
        self._offsets = array("Q", [0])
        self._num_loss = 0
        self._draft = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        self._has_mask, self._has_names, self._has_images = has_mask, has_names, has_images
        self._images: ImageStoreWriter | None = None
        self._shard_tokens = shard_tokens
        self._shards: list[int] = []
        self._names: list[str] = []
        self._parts: dict[str, BinaryIO] = {}

    def __enter__(self) -> "TokenFileWriter":
        shutil.rmtree(self._draft, ignore_errors=True)
        self._draft.mkdir(parents=True)
        self._open_shard()
        if self._has_names:
            self._open("names", NAMES)
        if self._has_images:
            self._images = ImageStoreWriter(self._draft)
            self._names += [IMAGES, PIXELS]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for part in self._parts.values():
            part.close()
        if self._images is not None:
            self._images.close()
        try:
            if kind is None:
                self._publish()
        finally:
            shutil.rmtree(self._draft, ignore_errors=True)

    def add(
        self,
        tokens: npt.ArrayLike,
        lengths: Iterable[int],
        mask: npt.ArrayLike | None = None,
        names: Sequence[tuple[str, str]] | None = None,
        images: Sequence[EncodedPicture] = (),
    ) -> None:
        """Append documents of `lengths` tokens; `tokens` (and `mask`) hold them end to end.

        `names` has the name of each document and the sha256 of its source, `images` their pictures
        with spans in `tokens`, in order.
        """
        ids = np.asarray(tokens)
        lengths = list(lengths)
        self._check(ids, lengths)
        if (mask is not None) != self._has_mask:
            raise K3Error("a mask is given exactly when the file is made with has_mask=True")
        if (len(names) if names is not None else None) != (
            len(lengths) if self._has_names else None
        ):
            raise K3Error("one name a document is given exactly with has_names=True")
        if self._shard_tokens and self._shards[-1] >= self._shard_tokens:
            self._open_shard()
        if mask is not None:
            flags = np.asarray(mask, dtype=np.uint8)
            if flags.shape != ids.shape:
                raise K3Error(f"mask has {len(flags)} entries for {len(ids)} tokens")
            self._parts["mask"].write(flags.tobytes())
            self._num_loss += int(flags.sum())
        else:
            self._num_loss += len(ids)
        if images and self._images is None:
            raise K3Error("pictures are given exactly when the file is made with has_images=True")
        if self._images is not None:
            self._images.add(images, self.num_tokens)
        self._parts["tokens"].write(ids.astype(self._dtype).tobytes())
        for name in names or ():
            self._parts["names"].write((json.dumps(name) + "\n").encode())
        for length in lengths:
            self._offsets.append(self._offsets[-1] + length)
        self._shards[-1] += len(ids)
        self.num_tokens = self._offsets[-1]

    @property
    def num_documents(self) -> int:
        """Documents so far."""
        return len(self._offsets) - 1

    def _check(self, ids: npt.NDArray[Any], lengths: list[int]) -> None:
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

    def _open(self, part: str, name: str) -> None:
        if part in self._parts:
            self._parts[part].close()
        self._parts[part] = (self._draft / name).open("wb")
        self._names.append(name)

    def _open_shard(self) -> None:
        number = f".{len(self._shards):05d}" if self._shard_tokens else ""
        self._shards.append(0)
        self._open("tokens", f"tokens{number}.bin")
        if self._has_mask:
            self._open("mask", f"mask{number}.bin")

    def _publish(self) -> None:
        (self._draft / OFFSETS).write_bytes(self._offsets.tobytes())
        manifest = {
            "format": FORMAT,
            "dtype": self._dtype.name,
            "vocab_size": self._vocab_size,
            "num_tokens": self.num_tokens,
            "num_loss_tokens": self._num_loss,
            "num_documents": self.num_documents,
            **({"shards": self._shards} if self._shard_tokens else {}),
            **({"images": self._images.publish()} if self._images is not None else {}),
            "sha256": {name: file_sha256(self._draft / name) for name in (*self._names, OFFSETS)},
            "sources": self._sources,
        }
        (self._draft / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        if self.path.exists():
            if not (self.path / MANIFEST).is_file():
                raise K3Error(f"{self.path} exists and is not a token file: choose another name")
            shutil.rmtree(self.path)
        self._draft.rename(self.path)


def _map_part(
    path: Path, part: str, dtype: str, manifest: Mapping[str, Any]
) -> npt.NDArray[Any] | ShardedArray:
    sizes = manifest.get("shards")
    if sizes is None:
        return map_array(path / f"{part}.bin", dtype, (manifest["num_tokens"],))
    return ShardedArray(
        [map_array(path / f"{part}.{i:05d}.bin", dtype, (n,)) for i, n in enumerate(sizes)]
    )
