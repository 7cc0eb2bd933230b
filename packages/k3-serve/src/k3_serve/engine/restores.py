"""Requests that wait for a prefix to come up from a tier (report 5.4; serving 9b, I11).

Everything here runs on the engine's thread but the copies. A restore owns the pages it writes;
they become a part of the index when all of them are written, or go back. A request asks once an
admission: whatever becomes of the restore, it then goes on with what the index has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from k3_serve.cache.index import PrefixIndex
from k3_serve.cache.pages import OutOfPages
from k3_serve.cache.records import Match
from k3_serve.cache.tiers.ledger import Entry
from k3_serve.cache.tiers.restore import Restore, Source
from k3_serve.cache.tiers.store import TierStore
from k3_serve.engine.request import RequestState, Restored

if TYPE_CHECKING:
    from k3_serve.cache.arena import Arena
    from k3_serve.observer import Observer


@dataclass(eq=False)
class _Open:
    """A restore under way: the page table of its prefix, and who waits for it, with its hit."""

    restore: Restore
    keys: list[bytes]
    table: list[int]
    waiting: dict[RequestState, int] = field(default_factory=dict)


class Restores:
    """The restores of one index.

    arena: the pages of the index. post: has a function called on the engine's thread.
    """

    def __init__(
        self,
        tiers: TierStore,
        index: PrefixIndex,
        arena: Callable[[], Arena],
        post: Callable[[Callable[[], None]], None],
        observer: Observer,
    ) -> None:
        self._tiers, self._index, self._arena = tiers, index, arena
        self._post, self._observer = post, observer
        self._open: dict[bytes, _Open] = {}

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a tier; from any thread."""
        return sum(len(going.waiting) for going in list(self._open.values()))

    def begin(self, request: RequestState, match: Match) -> bool:
        """Whether the request waits for a longer prefix than that of `match`."""
        unit = self._index.unit
        if request.has_asked_tiers or not request.can_hit:
            return False
        request.has_asked_tiers = True
        keys = request.unit_keys(unit)[: (len(request.rows) - 1) // unit]
        longer = keys[match.num_tokens // unit :]
        found = self._tiers.find(longer) if longer else None
        if found is None:
            return False
        tier, entry = found
        going = self._open.get(entry.key)
        if going is not None:
            self._tiers.leave(tier, entry)
        else:
            going = self._start(tier, entry, keys[: entry.num_tokens // unit])
        if going is None:
            self._tiers.leave(tier, entry)
            self._fall_back("out_of_pages")
            return False
        going.waiting[request] = match.num_tokens
        request.is_restoring = True
        return True

    def _start(self, tier: Source, entry: Entry, keys: list[bytes]) -> _Open | None:
        """Allocates and begins to copy; None when there are no pages."""
        index = self._index
        held = index.latents(keys)
        index.pool.pin(held)
        num_missing = len(entry.pages) - len(held)
        try:
            own = index.allocate(num_missing + index.checkpoint_pages)
        except OutOfPages:
            index.release(held)
            return None
        extent, pages = own[num_missing:], own[:num_missing]
        missing = list(zip(entry.pages[len(held) :], pages, strict=True))
        restore = Restore(tier, entry, extent, missing, self._arena())
        going = self._open[entry.key] = _Open(restore, keys, held + pages)
        self._tiers.start(restore, lambda: self._post(lambda: self._finish(going)))
        return going

    def _finish(self, going: _Open) -> None:
        """The copies have ended."""
        restore = going.restore
        if self._open.get(restore.entry.key) is not going:
            return  # it was cancelled
        self._close(going, is_good=restore.failure is None)
        restored = None
        if restore.failure is None:
            restored = self._report(restore)
        else:
            self._fall_back(restore.failure)
        for request, num_hit in going.waiting.items():
            if restored is not None:
                num_tokens = restore.entry.num_tokens - num_hit
                request.restored = Restored(num_tokens, *restored, restore.tier.name)
            request.is_restoring = False

    def _close(self, going: _Open, is_good: bool) -> None:
        """Registers what was written, or gives it back."""
        entry, index = going.restore.entry, self._index
        del self._open[entry.key]
        if is_good:
            index.register_pages(going.keys, going.table, entry.num_tokens)
            index.register_checkpoint(entry.key, entry.num_tokens, going.restore.extent, entry.kind)
        else:
            index.release(going.restore.extent)
        index.release(going.table)
        self._tiers.leave(going.restore.tier, entry)

    def leave(self, request: RequestState) -> None:
        """The request waits no longer; a restore that nobody waits for stops at once."""
        for going in list(self._open.values()):
            if going.waiting.pop(request, None) is None:
                continue
            request.is_restoring = False
            if not going.waiting:
                going.restore.cancel()
                self._close(going, is_good=False)
                self._fall_back("abandoned")

    def cancel_all(self) -> None:
        """Stops all; who waited is back in the queue."""
        for going in list(self._open.values()):
            going.restore.cancel()
            self._close(going, is_good=False)
            self._fall_back("cancelled")
            for request in going.waiting:
                request.is_restoring = False

    def _fall_back(self, reason: str) -> None:
        self._observer.count("k3_restore_fallback_total", 1, {"reason": reason})

    def _report(self, restore: Restore) -> tuple[int, float]:
        """Counts a restore: its bytes and seconds."""
        tier = restore.tier.name
        for kind, seconds in restore.seconds.items():
            labels = {"kind": kind, "tier": tier}
            self._observer.observe("k3_cache_restore_seconds", seconds, labels)
            moved = {"kind": kind, "from": tier, "to": "device"}
            amount = restore.num_bytes[kind]
            self._observer.count("k3_cache_moved_bytes_total", amount, moved)
        return sum(restore.num_bytes.values()), sum(restore.seconds.values())
