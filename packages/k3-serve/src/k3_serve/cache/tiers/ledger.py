"""What a tier holds and what goes when it is full; pure Python (serving 9b).

An entry is a prefix that can be restored: its KDA state and the latent pages of all its tokens.
Pages are shared between entries and stay as long as one needs them, so that a state without its
pages, or pages without a state, cannot be there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from k3_serve.cache.evict import EvictionQueue, log_value


@dataclass(eq=False)
class Entry:
    """A prefix in a tier.

    key: of its last unit. pages: per page, the key of the last unit used of it. state_bytes: what
    its state takes in the tier.
    """

    key: bytes
    num_tokens: int
    kind: str
    pages: tuple[bytes, ...]
    state_bytes: int
    last_use: int = 0
    """In bytes that the tier took in."""
    num_readers: int = 0
    """Copies that read it now; it stays as long."""
    is_alive: bool = field(default=True, repr=False)


class Ledger:
    """Entries within `capacity` bytes; a page takes `page_bytes`. The cheapest one goes first."""

    def __init__(self, capacity: int, page_bytes: int) -> None:
        self.capacity, self.page_bytes = capacity, page_bytes
        self.used = self.state_bytes = 0
        self.entries: dict[bytes, Entry] = {}
        self._references: Counter[bytes] = Counter()
        self._cheapest: EvictionQueue[Entry] = EvictionQueue()
        self._age = 0

    @property
    def latent_bytes(self) -> int:
        """Bytes of pages."""
        return self.used - self.state_bytes

    def holds_page(self, key: bytes) -> bool:
        """Whether the latents that end with this unit are here."""
        return key in self._references

    def deepest(self, keys: Sequence[bytes]) -> Entry | None:
        """The entry of the longest prefix; keys: of the units at which it may end."""
        return next((self.entries[k] for k in reversed(keys) if k in self.entries), None)

    def whole_bytes(self, entry: Entry) -> int:
        """What the entry takes when nothing of it is here."""
        return entry.state_bytes + len(entry.pages) * self.page_bytes

    def missing(self, entry: Entry) -> list[bytes]:
        """Pages of an entry that are not here."""
        return [key for key in entry.pages if key not in self._references]

    def has_room(self, entry: Entry) -> bool:
        """Whether the entry fits beside all others."""
        need = entry.state_bytes + len(self.missing(entry)) * self.page_bytes
        return self.used + need <= self.capacity

    def evict(self) -> tuple[Entry, list[bytes]] | None:
        """Takes the cheapest entry out, and the pages that go with it; None when all are read."""
        entry = self._cheapest.pop(self._priority)
        return None if entry is None else (entry, self.remove(entry))

    def add(self, entry: Entry) -> None:
        """Takes an entry in, which has room and whose missing pages are written."""
        self._age += entry.state_bytes + len(self.missing(entry)) * self.page_bytes
        self.used += entry.state_bytes + len(self.missing(entry)) * self.page_bytes
        self.state_bytes += entry.state_bytes
        self._references.update(entry.pages)
        self.entries[entry.key] = entry
        self.touch(entry)

    def remove(self, entry: Entry) -> list[bytes]:
        """Takes an entry out; the pages that nothing else needs."""
        entry.is_alive = False
        del self.entries[entry.key]
        self._cheapest.discard(entry)
        self._references.subtract(entry.pages)
        gone = [key for key in entry.pages if not self._references[key]]
        for key in gone:
            del self._references[key]
        self.used -= entry.state_bytes + len(gone) * self.page_bytes
        self.state_bytes -= entry.state_bytes
        return gone

    def with_page(self, key: bytes) -> list[Entry]:
        """Entries that need a page."""
        return [entry for entry in self.entries.values() if key in entry.pages]

    def touch(self, entry: Entry) -> None:
        """The entry was used."""
        entry.last_use = self._age
        self._offer(entry)

    def pin(self, entry: Entry) -> None:
        """A copy begins to read the entry."""
        entry.num_readers += 1

    def unpin(self, entry: Entry) -> None:
        """A copy has ended."""
        entry.num_readers -= 1
        if entry.is_alive:
            self._offer(entry)

    def _offer(self, entry: Entry) -> None:
        priority = self._priority(entry)
        if priority is not None:
            self._cheapest.push(entry, priority)

    def _priority(self, entry: Entry) -> float | None:
        """As in the arena: tokens saved by bytes, fading with one turnover of the tier."""
        if entry.num_readers:
            return None
        size = self.whole_bytes(entry)
        return log_value(entry.num_tokens, size, entry.last_use, float(self.capacity))
