"""The tier in host memory: one tensor of slots, each of the size of a page (serving 9b).

The memory is pinned when the arena is on a GPU. Copies into it run on the engine's stream, so
that they see a page as it is when it is evicted; whoever reads the slots waits for that.

Legend: S slots, N pages, B bytes of a page.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

import torch
from torch import Tensor

from k3_serve.cache.arena import Arena, ArenaLayout
from k3_serve.cache.tiers.ledger import Entry, Ledger

CHUNK_BYTES = 64 << 20
"""Most bytes of pages that are gathered at once on their way."""


class HostTier:
    """Evicted prefixes in `num_bytes` of host memory; callable from any thread."""

    name = "cpu"

    def __init__(self, layout: ArenaLayout, num_bytes: int, device: torch.device) -> None:
        self.layout, self._device = layout, device
        num_slots = num_bytes // layout.page_bytes
        self.ledger = Ledger(num_slots * layout.page_bytes, layout.page_bytes)
        self.lock = threading.RLock()
        shape, is_pinned = (num_slots, layout.page_bytes), device.type == "cuda"
        self._bytes_SB = torch.empty(shape, dtype=torch.uint8, pin_memory=is_pinned)
        self._free = list(range(num_slots - 1, -1, -1))
        self._states: dict[bytes, list[int]] = {}
        self._pages: dict[bytes, int] = {}
        self._ready: dict[bytes, torch.cuda.Event] = {}

    def put(
        self, entry: Entry, arena: Arena, pages: Mapping[bytes, int], extent: Sequence[int]
    ) -> None:
        """Copies what is missing of an entry that has room; called between two steps.

        pages: key -> page of the arena.
        """
        with self.lock:
            missing = self.ledger.missing(entry)
            slots = [self._free.pop() for _ in range(len(missing) + len(extent))]
            try:
                self._copy_out(arena, [*extent, *(pages[key] for key in missing)], slots)
            except RuntimeError:
                self._free += slots
                raise
            self._states[entry.key] = slots[: len(extent)]
            self._pages.update(zip(missing, slots[len(extent) :], strict=True))
            if self._device.type == "cuda":
                event = torch.cuda.Event()
                event.record()
                self._ready[entry.key] = event
            self.ledger.add(entry)

    def evict(self) -> Entry | None:
        """Frees the slots of the cheapest entry; None when all are read."""
        with self.lock:
            found = self.ledger.evict()
            if found is None:
                return None
            self._free_slots(*found)
            return found[0]

    def clear(self) -> None:
        """Forgets everything; what is read now stays until it was read."""
        with self.lock:
            while self.evict() is not None:
                pass

    def read_state(self, entry: Entry, device: torch.device) -> Tensor:
        """The pages of the entry's extent [N, B] on a device; the entry is pinned."""
        self._wait(entry)
        return self._copy_in(self._states[entry.key], device)

    def read_pages(
        self, entry: Entry, keys: Sequence[bytes], device: torch.device
    ) -> Iterator[Tensor]:
        """Pages of a pinned entry in pieces [N, B] on a device."""
        self._wait(entry)
        todo = iter(keys)
        size = max(1, CHUNK_BYTES // self.layout.page_bytes)
        while piece := list(islice(todo, size)):
            yield self._copy_in([self._pages[key] for key in piece], device)

    def _wait(self, entry: Entry) -> None:
        if entry.key in self._ready:
            self._ready[entry.key].synchronize()

    def _free_slots(self, entry: Entry, pages: Sequence[bytes]) -> None:
        self._ready.pop(entry.key, None)
        self._free += self._states.pop(entry.key)
        self._free += [self._pages.pop(key) for key in pages]

    def _copy_out(self, arena: Arena, pages: list[int], slots: list[int]) -> None:
        size = max(1, CHUNK_BYTES // self.layout.page_bytes)
        for first in range(0, len(pages), size):
            rows_NB = arena.read_pages(pages[first : first + size])
            for slot, at, count in _runs(slots[first : first + size]):
                self._bytes_SB[slot : slot + count].copy_(
                    rows_NB[at : at + count], non_blocking=True
                )

    def _copy_in(self, slots: list[int], device: torch.device) -> Tensor:
        rows_NB = torch.empty(len(slots), self.layout.page_bytes, dtype=torch.uint8, device=device)
        for slot, at, count in _runs(slots):
            rows_NB[at : at + count].copy_(self._bytes_SB[slot : slot + count], non_blocking=True)
        return rows_NB


def _runs(slots: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Consecutive slots: (first slot, index of it, number)."""
    start = 0
    for index in range(1, len(slots) + 1):
        if index == len(slots) or slots[index] != slots[index - 1] + 1:
            yield slots[start], start, index - start
            start = index
