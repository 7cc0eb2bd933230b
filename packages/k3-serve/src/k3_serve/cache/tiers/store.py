"""Both tiers as one: what the arena evicts goes down, and is found again (serving 9b, 9e)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from k3_serve.cache.arena import Arena
from k3_serve.cache.records import EvictedCheckpoint, EvictedPages
from k3_serve.cache.tiers.disk import DiskTier
from k3_serve.cache.tiers.host import HostTier
from k3_serve.cache.tiers.ledger import Entry
from k3_serve.cache.tiers.restore import Restore, Source
from k3_serve.cache.tiers.worker import Worker
from k3_serve.observer import Observer

logger = logging.getLogger("k3_serve.tiers")
CLOSE_SECONDS = 10.0
"""How long `TierStore.close` writes to files what only the host memory has."""
CPU = torch.device("cpu")


@dataclass(frozen=True)
class TierStats:
    """Bytes in a tier by kind, and prefixes."""

    tier: str
    num_prefixes: int
    state_bytes: int
    mla_bytes: int


class TierStore:
    """Host memory, and files behind it when there is a folder.

    An evicted checkpoint goes to host memory with the latents of its whole prefix. While more
    than half of that memory is in no file, a worker writes the longest evicted prefix to files.
    Called from the engine's thread, but for `stats`.
    """

    def __init__(
        self,
        host: HostTier,
        disk: DiskTier | None,
        writer: Worker,
        reader: Worker,
        observer: Observer,
    ) -> None:
        self._host, self._disk = host, disk
        self.writer, self.reader = writer, reader
        self._observer = observer
        self._dirty: dict[bytes, Entry] = {}  # in no file, in the order of their eviction
        self._space = "" if disk is None else disk.space
        if disk is not None:
            self._count_ignored()

    @property
    def has_files(self) -> bool:
        """Whether what goes down outlives the engine."""
        return self._disk is not None

    # Down

    def write_back(self, arena: Arena, event: EvictedCheckpoint | EvictedPages) -> None:
        """Takes in what the arena evicts; its bytes are intact during the call.

        Latents that no checkpoint makes usable are let go.
        """
        if isinstance(event, EvictedPages):
            return
        gone, host = event.checkpoint, self._host
        known = host.ledger.entries.get(gone.key)
        if known is not None:
            with host.lock:
                host.ledger.touch(known)
            return
        size = len(gone.extent) * host.layout.page_bytes
        entry = Entry(gone.key, gone.num_tokens, gone.kind, event.keys, size)
        if not self._make_room(entry):
            self._drop("cpu", "room")
            return
        num_pages = len(host.ledger.missing(entry))
        pages = dict(zip(event.keys, event.pages, strict=True))
        try:
            host.put(entry, arena, pages, gone.extent)
        except RuntimeError:  # as when a GPU has no memory for the copy
            logger.exception("a prefix is not kept")
            self._drop("cpu", "error")
            return
        self._moved("device", "cpu", size, num_pages * host.layout.page_bytes)
        if self._disk is not None and not self._disk.holds(entry.key):
            self._dirty[entry.key] = entry
            self._spill()

    def _make_room(self, entry: Entry) -> bool:
        ledger = self._host.ledger
        if ledger.whole_bytes(entry) > ledger.capacity:
            return False
        while not ledger.has_room(entry):
            gone = self._host.evict()
            if gone is None:
                return False
            if self._dirty.pop(gone.key, None) is not None:
                self._drop("disk", "not_written")
        return True

    def _spill(self) -> None:
        ledger = self._host.ledger
        most = ledger.capacity // 2
        sizes = {key: ledger.whole_bytes(entry) for key, entry in self._dirty.items()}
        total = sum(sizes.values())
        for entry in list(self._dirty.values()):
            if total <= most or not self._write_later(entry, is_optional=True):
                return
            total -= sizes[entry.key]

    def _write_later(self, entry: Entry, is_optional: bool) -> bool:
        with self._host.lock:
            self._host.ledger.pin(entry)
        if not self.writer.submit(partial(self._write, self._space, entry), is_optional):
            self._unpin_host(entry)
            self._drop("disk", "queue")
            return False
        del self._dirty[entry.key]
        return True

    def _write(self, space: str, entry: Entry) -> None:
        """On the writer's thread."""
        assert self._disk is not None, "only entries of a store with files are written"
        try:
            state_NB = self._host.read_state(entry, CPU)
            read = partial(self._host.read_pages, entry, device=CPU)
            sizes = self._disk.write(space, entry, state_NB, read)
            self._moved("cpu", "disk", *sizes)
        except OSError as error:
            logger.warning("a prefix is not written to a file: %s", error.strerror or error)
            self._drop("disk", "io")
        finally:
            self._unpin_host(entry)

    def _unpin_host(self, entry: Entry) -> None:
        with self._host.lock:
            self._host.ledger.unpin(entry)

    # Up

    def find(self, keys: Sequence[bytes]) -> tuple[Source, Entry] | None:
        """The deepest prefix that ends with one of `keys`, which are in order; pinned."""
        best: tuple[Source, Entry] | None = None
        for tier in (self._host, self._disk):
            if tier is None or (tier is self._disk and self._disk.space != self._space):
                continue
            with tier.lock:
                entry = tier.ledger.deepest(keys)
                is_hit = entry is not None and (
                    best is None or entry.num_tokens > best[1].num_tokens
                )
                if entry is not None and is_hit:
                    if best is not None:
                        self.leave(*best)
                    best = tier, entry
                    tier.ledger.pin(entry)
                    tier.ledger.touch(entry)
            outcome = "hit" if is_hit else "miss"
            self._observer.count("k3_tier_lookups_total", 1, {"tier": tier.name, "result": outcome})
            if is_hit and tier is self._host and entry is not None and entry.key == keys[-1]:
                break
        return best

    def leave(self, tier: Source, entry: Entry) -> None:
        """Lets go of what `find` pinned."""
        with tier.lock:
            tier.ledger.unpin(entry)

    def start(self, restore: Restore, done: Callable[[], None]) -> None:
        """Runs a restore on the reader's thread, which then calls `done`."""

        def job() -> None:
            restore.run()
            done()

        self.reader.submit(job)

    # Life

    def forget(self, space_of: Callable[[], str]) -> None:
        """Other weights: nothing of the old ones is given out from now on.

        space_of: gives the name of the new ones, which only files need.
        """
        self._dirty.clear()
        self._host.clear()
        if self._disk is not None:
            self._space = space_of()
            self.writer.submit(self._open)

    def _open(self) -> None:
        assert self._disk is not None, "only a store with files opens them"
        self._disk.open(self._space)
        self._count_ignored()

    def close(self) -> None:
        """Writes what is in no file yet, as far as the time suffices, and ends the threads."""
        deadline = time.monotonic() + CLOSE_SECONDS
        for entry in list(self._dirty.values()):
            self._write_later(entry, is_optional=False)
        self.writer.close(CLOSE_SECONDS)
        self.reader.close(max(0.0, deadline - time.monotonic()))
        if self._disk is not None:
            self._disk.close()

    def stats(self) -> list[TierStats]:
        """What the tiers hold now; from any thread."""
        found = []
        for tier in (self._host, self._disk):
            if tier is not None:
                ledger = tier.ledger
                held = len(ledger.entries), ledger.state_bytes, ledger.latent_bytes
                found.append(TierStats(tier.name, *held))
        return found

    # Figures

    def _count_ignored(self) -> None:
        assert self._disk is not None, "only a store with files ignores some"
        for reason, number in self._disk.ignored.items():
            logger.warning("%d files of the cache folder are not used: %s", number, reason)
            self._observer.count("k3_tier_ignored_files_total", number, {"reason": reason})
        self._disk.ignored.clear()

    def _drop(self, tier: str, reason: str) -> None:
        self._observer.count("k3_tier_dropped_total", 1, {"tier": tier, "reason": reason})

    def _moved(self, source: str, target: str, state_bytes: int, mla_bytes: int) -> None:
        for kind, amount in (("state", state_bytes), ("mla", mla_bytes)):
            labels = {"kind": kind, "from": source, "to": target}
            self._observer.count("k3_cache_moved_bytes_total", amount, labels)
