"""The tier in files of one folder (serving 9b): a file a state, a file a page of latents.

A state's file names the pages of its prefix and is written last, so a prefix whose state is here
is whole. The folder belongs to one engine at a time. Its cache files of other weights or layouts,
and those that are damaged, are not read and are the first to go when room is needed; files that
are not of a cache are left alone.

Legend: N pages, B bytes of a page.
"""

from __future__ import annotations

import fcntl
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from k3_core.errors import K3Error
from k3_serve.cache.arena import ArenaLayout
from k3_serve.cache.tiers.files import (
    BLOCK,
    PARTIAL,
    BadFile,
    Header,
    checksum_of,
    read_file,
    scan_file,
    write_file,
)
from k3_serve.cache.tiers.ledger import Entry, Ledger

logger = logging.getLogger("k3_serve.tiers")
SUFFIXES = {"state": ".state", "latents": ".latents"}
LOCK = "in-use"


class DiskTier:
    """Prefixes in at most `num_bytes` of files. Every method may be called from any thread.

    `ignored` counts the files that a scan found and did not take, by reason.
    """

    name = "disk"

    def __init__(self, folder: Path, num_bytes: int, layout: ArenaLayout, space: str) -> None:
        self.layout, self._folder = layout, folder
        self.lock = threading.RLock()
        self.ignored: Counter[str] = Counter()
        self._capacity = num_bytes
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._claim = (folder / LOCK).open("w")
            fcntl.flock(self._claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise K3Error(
                f"the cache folder {folder} is in use by another engine; give each its own"
            ) from error
        except OSError as error:
            raise K3Error(
                f"cannot use the cache folder {folder}: {error.strerror or error}; choose another"
            ) from error
        self.open(space)

    def close(self) -> None:
        """Lets others use the folder."""
        self._claim.close()

    def open(self, space: str) -> None:
        """Looks through the folder for files of the weights and layout that `space` stands for."""
        with self.lock:
            self.space = space
            self.ledger = Ledger(self._capacity, BLOCK + self.layout.page_bytes)
            self._stale: dict[Path, int] = {}
            states, pages = self._scan()
            for header, size, path in states:
                keys = tuple(bytes.fromhex(key) for key in header.pages)
                key = bytes.fromhex(header.key)
                entry = Entry(key, header.num_tokens, header.kind, keys, size)
                if pages.issuperset(keys):
                    self.ledger.add(entry)
                else:
                    self._ignore(path, size, "missing")
            for key in pages:
                if not self.ledger.holds_page(key):
                    self._ignore(self._path("latents", key), self.ledger.page_bytes, "missing")
            self._trim(0)

    def _scan(self) -> tuple[list[tuple[Header, int, Path]], set[bytes]]:
        """States and keys of pages in the folder, the oldest states first."""
        states, pages = [], set()
        for path in self._folder.iterdir():
            if path.name.endswith(PARTIAL):
                path.unlink(missing_ok=True)
            if path.suffix not in SUFFIXES.values():
                continue
            try:
                header, size = scan_file(path)
            except BadFile as error:
                self._ignore(path, path.stat().st_size, error.reason)
                continue
            expected = self._expected(header.part)
            if header.space != self.space or (header.num_bytes, header.shape) != expected:
                self._ignore(path, size, "foreign")
            elif header.part == "state":
                states.append((header, size, path))
            else:
                pages.add(bytes.fromhex(header.key))
        return sorted(states, key=lambda found: found[2].stat().st_mtime), pages

    def _expected(self, part: str) -> tuple[int, tuple[int, ...]]:
        """Bytes and shape of a payload."""
        layout = self.layout
        count = layout.checkpoint_pages if part == "state" else 1
        return count * layout.page_bytes, (count, layout.page_bytes)

    def _ignore(self, path: Path, size: int, reason: str) -> None:
        self.ignored[reason] += 1
        self._stale[path] = size

    @property
    def used(self) -> int:
        """Bytes of files, those of other weights included."""
        with self.lock:
            return self.ledger.used + sum(self._stale.values())

    def holds(self, key: bytes) -> bool:
        """Whether a prefix is here."""
        with self.lock:
            return key in self.ledger.entries

    # Writing

    def write(self, space: str, entry: Entry, state_NB: Tensor, read: ReadPages) -> tuple[int, int]:
        """Writes what is missing of a prefix; bytes of state and latents. Raises OSError.

        read: gives pages by their keys. Nothing is written when the weights are others now, when
        the prefix is known or when it can have no room.
        """
        with self.lock:
            mine = Entry(entry.key, entry.num_tokens, entry.kind, entry.pages, 0)
            header = self._header("state", mine.key, state_NB, mine)
            mine.state_bytes = len(header.encode()) + header.num_bytes
            if space != self.space or self.holds(entry.key):
                return 0, 0
            missing = self._make_room(mine)
            if missing is None:
                return 0, 0
        written: list[bytes] = []
        try:
            for key, page_B in zip(missing, _rows(read(missing)), strict=True):
                write_file(
                    self._path("latents", key), self._header("latents", key, page_B), _data(page_B)
                )
                written.append(key)
            write_file(self._path("state", entry.key), header, _data(state_NB))
        except BaseException:
            self._unlink(self._path("latents", key) for key in written)
            raise
        with self.lock:
            self.ledger.add(mine)
        return mine.state_bytes, len(missing) * self.ledger.page_bytes

    def _make_room(self, entry: Entry) -> list[bytes] | None:
        """Frees what an entry needs; the pages to write, None when it can never fit."""
        if self.ledger.whole_bytes(entry) > self._capacity:
            return None
        while True:
            missing = self.ledger.missing(entry)
            need = entry.state_bytes + len(missing) * self.ledger.page_bytes
            if self.used + need <= self._capacity:
                return missing
            if not self._trim(need):
                return None

    def _trim(self, need: int) -> bool:
        """Deletes until `need` bytes more fit; False when nothing can go."""
        while self.used + need > self._capacity:
            if self._stale:
                path, _ = self._stale.popitem()
                self._unlink([path])
                continue
            found = self.ledger.evict()
            if found is None:
                return False
            self._delete(*found)
        return True

    def _delete(self, entry: Entry, pages: Iterable[bytes]) -> None:
        """The state first: what is left without it is not a prefix."""
        self._unlink([self._path("state", entry.key), *(self._path("latents", k) for k in pages)])

    def _unlink(self, paths: Iterable[Path]) -> None:
        for path in paths:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                logger.warning("cannot delete %s: %s", path.name, error.strerror)

    def _header(self, part: str, key: bytes, data: Tensor, entry: Entry | None = None) -> Header:
        num_bytes, shape = self._expected(part)
        return Header(
            space=self.space,
            part=part,
            key=key.hex(),
            num_tokens=entry.num_tokens if entry else 0,
            kind=entry.kind if entry else "",
            pages=tuple(page.hex() for page in entry.pages) if entry else (),
            shape=shape,
            dtype="uint8",
            num_bytes=num_bytes,
            checksum=checksum_of(_data(data)).hex(),
        )

    def _path(self, part: str, key: bytes) -> Path:
        return self._folder / f"{self.space[:16]}-{key.hex()}{SUFFIXES[part]}"

    # Reading

    def read_state(self, entry: Entry, device: torch.device) -> Tensor:
        """The pages of the entry's extent [N, B] on a device. Raises BadFile; then it is gone."""
        return self._read(entry, "state", entry.key, device)

    def read_pages(
        self, entry: Entry, keys: Sequence[bytes], device: torch.device
    ) -> Iterator[Tensor]:
        """Pages of an entry one by one, [1, B] on a device. Raises BadFile as `read_state`."""
        for key in keys:
            yield self._read(entry, "latents", key, device)

    def _read(self, entry: Entry, part: str, key: bytes, device: torch.device) -> Tensor:
        try:
            header, payload = read_file(self._path(part, key), self.space, part, key)
            if (header.num_bytes, header.shape) != self._expected(part):
                raise BadFile("foreign", self._path(part, key), f"its shape is {header.shape}")
        except BadFile:
            self._forget(entry if part == "state" else key)
            raise
        data = torch.frombuffer(payload, dtype=torch.uint8)
        return data.view(header.shape).to(device)

    def _forget(self, bad: Entry | bytes) -> None:
        """Drops an entry, or all that need a page."""
        with self.lock:
            entries = [bad] if isinstance(bad, Entry) else self.ledger.with_page(bad)
            for entry in entries:
                if entry.is_alive:
                    self._delete(entry, self.ledger.remove(entry))


ReadPages = Callable[[Sequence[bytes]], Iterable[Tensor]]


def _rows(pieces: Iterable[Tensor]) -> Iterator[Tensor]:
    for piece_NB in pieces:
        yield from piece_NB


def _data(rows: Tensor) -> memoryview:
    return rows.contiguous().view(-1).numpy().data
