"""The prefix index beside a naive dictionary and a simulated arena, and the checks on all three.

A prefix is a tuple of what seeds the keys and one symbol a token, so that n tokens are n + 1
entries. An image is a symbol of its own although all images have the same placeholder token.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache

import pytest

from k3_serve.cache import (
    EvictedCheckpoint,
    OutOfPages,
    PagePool,
    PrefixIndex,
    seed_key,
    unit_keys,
)

IMAGE_ID = 9


@lru_cache(maxsize=4096)
def keys_of(prefix, unit):
    """Keys of the whole units of a prefix."""
    (salt, version), *symbols = prefix
    ids = [IMAGE_ID if isinstance(s, str) else s for s in symbols]
    images = [(i, s.encode()) for i, s in enumerate(symbols) if isinstance(s, str)]
    return unit_keys(seed_key(version, salt, "float32"), ids, unit, images)


@dataclass
class Saved:
    """A checkpoint of the dictionary."""

    extent: tuple[int, ...]
    kind: str
    last_use: int
    num_hits: int = 0


@dataclass
class Naive:
    """The dictionary: of every registered page and checkpoint the exact prefix.

    half_life, age: the clock of recency, as in the index.
    """

    unit: int
    page_tokens: int
    half_life: float
    pages: dict[int, tuple] = field(default_factory=dict)
    checkpoints: dict[tuple, Saved] = field(default_factory=dict)
    references: Counter = field(default_factory=Counter)
    idle_since: dict[int, int] = field(default_factory=dict)
    age: int = 0
    indexed: dict[int, tuple] = field(default_factory=dict)
    ends: dict[tuple, list[int]] = field(default_factory=dict)

    def span(self, prefix):
        """Number of the page that holds the last token of a prefix."""
        return (len(prefix) - 2) // self.page_tokens

    def page_ends(self, num_tokens):
        """Tokens up to the end of each page of a prefix."""
        ends = range(self.page_tokens, num_tokens + self.page_tokens, self.page_tokens)
        return [min(end, num_tokens) for end in ends]

    def holders(self, prefix):
        """Pages that hold the last unit of a prefix."""
        if self.indexed != self.pages:
            self.indexed, self.ends = dict(self.pages), {}
            for page, held in self.pages.items():
                first = self.span(held) * self.page_tokens + self.unit
                for end in range(first, len(held), self.unit):
                    self.ends.setdefault(held[: end + 1], []).append(page)
        return self.ends.get(prefix, [])

    def best(self, prefix, limit):
        """(latent tokens, hit tokens) by trying every boundary."""
        latent = hit = 0
        for length in range(self.unit, limit + 1, self.unit):
            if all(self.holders(prefix[: end + 1]) for end in self.page_ends(length)):
                latent = length
                hit = length if prefix[: length + 1] in self.checkpoints else hit
        return latent, hit

    def register(self, prefix, table):
        for page, end in zip(table, self.page_ends(len(prefix) - 1), strict=False):
            part = prefix[: end + 1]
            if self.holders(part):
                continue
            self.pages[page] = part
            for other, held in list(self.pages.items()):
                is_within = self.span(held) == self.span(part) and part[: len(held)] == held
                if other != page and is_within:
                    del self.pages[other]

    def cached(self):
        """Registered pages that nobody refers to."""
        extents = [page for saved in self.checkpoints.values() for page in saved.extent]
        return [page for page in [*self.pages, *extents] if not self.references[page]]

    def num_active(self):
        return sum(n > 0 for n in self.references.values())

    def points(self, page):
        """Prefixes with a checkpoint at a unit of the page."""
        held = self.pages[page]
        same = [p for p in self.checkpoints if self.span(p) == self.span(held)]
        return [p for p in same if held[: len(p)] == p]

    def has_children(self, page):
        held = self.pages[page]
        later = [p for p in self.pages.values() if self.span(p) > self.span(held)]
        return any(p[: len(held)] == held for p in later)

    def idle_leaves(self):
        idle = [page for page in self.pages if not self.references[page]]
        return [page for page in idle if not self.has_children(page) and not self.points(page)]

    def values(self):
        """Value of every checkpoint that nobody refers to."""
        values = {}
        for prefix, saved in self.checkpoints.items():
            if self.references[saved.extent[0]]:
                continue
            shorter = [p for p in self.checkpoints if p == prefix[: len(p)] and p != prefix]
            tokens = len(prefix) - max(map(len, shorter), default=1)
            recency = 2 ** (-(self.age - saved.last_use) / self.half_life)
            values[prefix] = tokens * recency / len(saved.extent)
        return values

    def release(self, pages):
        for page in pages:
            self.references[page] -= 1
            if not self.references[page]:
                self.idle_since[page] = self.age


class World:
    """Runs every operation on the index and on the dictionary and compares what they say.

    arena: (page, row) -> the prefix that the row was computed from; a state is in row 0 of each
    page of its extent.
    """

    def __init__(self, num_pages, unit, units_per_page, checkpoint_pages, half_life):
        self.unit = unit
        self.size = unit * units_per_page
        self.pool = PagePool(num_pages)
        self.index = PrefixIndex(self.pool, unit, self.size, checkpoint_pages, half_life)
        self.index.on_evict = self.check_eviction
        self.naive = Naive(unit, self.size, half_life)
        self.arena: dict[tuple[int, int], tuple] = {}
        self.names: dict[bytes, tuple] = {}
        self.wanted = 0

    def keys(self, prefix):
        """Keys of a prefix; no two prefixes may share one (I12)."""
        keys = keys_of(prefix, self.unit)
        for i, key in enumerate(keys):
            part = prefix[: (i + 1) * self.unit + 1]
            assert self.names.setdefault(key, part) == part
        return keys

    def look_up(self, prefix, limit):
        """I2, I3: the hit is what the dictionary finds, and holds what it should (I1)."""
        match = self.index.lookup(self.keys(prefix), limit)
        latent, hit = self.naive.best(prefix, limit)
        assert (match.num_latent_tokens, match.num_tokens) == (latent, hit)
        assert match.junction == (latent if latent > hit else None)
        assert len(match.pages) == -(-hit // self.size)
        assert match.copy_source == (match.pages[-1] if hit % self.size else None)
        assert (match.checkpoint is None) == (hit == 0)
        if hit:
            extent = self.naive.checkpoints[prefix[: hit + 1]].extent
            assert match.checkpoint.extent == extent
            self.check_bytes(prefix[: hit + 1], match.pages, extent)
        return match

    def check_bytes(self, prefix, pages, extent):
        for i in range(len(prefix) - 1):
            assert self.arena[pages[i // self.size], i % self.size] == prefix[: i + 2]
        for part, page in enumerate(extent):
            assert self.arena[page, 0] == ("state", part, prefix)

    def claim(self, prefix, match):
        """May raise StaleMatch, and then nothing is held."""
        self.index.claim(match)
        self.naive.references.update(match.pages)
        if match.checkpoint is not None:
            saved = self.naive.checkpoints[prefix[: match.num_tokens + 1]]
            saved.num_hits += 1
            saved.last_use = self.naive.age
            self.naive.references.update(saved.extent)

    def allocate(self, count):
        """Pages of the index, or None exactly when too many are referred to (I4)."""
        naive = self.naive
        available = self.pool.num_pages - naive.num_active()
        self.wanted = count
        try:
            pages = self.index.allocate(count)
        except OutOfPages:
            assert count > available
            return None
        assert len(set(pages)) == count <= available
        assert not any(naive.references[page] for page in pages)
        assert not {*pages} & {*naive.pages, *naive.cached()}
        naive.references.update(pages)
        naive.age += count
        self.arena.update({(page, row): () for page in pages for row in range(self.size)})
        return pages

    def check_eviction(self, event):
        """Only what is worth least may go, only whole (I6), and only while it is needed."""
        naive, cached = self.naive, self.naive.cached()
        assert cached and self.pool.num_pages - naive.num_active() - len(cached) < self.wanted
        leaves, values = naive.idle_leaves(), naive.values()
        if isinstance(event, EvictedCheckpoint):
            prefix = self.names[event.checkpoint.key]
            assert not leaves
            assert not values or values[prefix] <= min(values.values()) * (1 + 1e-9)
            extent = naive.checkpoints.pop(prefix).extent
            assert event.checkpoint.extent == extent
            self.check_bytes(prefix, event.pages, extent)
            ends = naive.page_ends(len(prefix) - 1)
            assert [self.names[key] for key in event.keys] == [prefix[: e + 1] for e in ends]
            return
        (page,) = event.pages
        assert self.names[event.key] == naive.pages[page]
        assert event.num_tokens == len(naive.pages[page]) - 1
        if leaves:
            assert page in leaves
            assert naive.idle_since[page] == min(naive.idle_since[leaf] for leaf in leaves)
        else:  # idle pages that carry those of somebody else's request
            assert not values and not naive.has_children(page) and not naive.points(page)
        del naive.pages[page]

    def write(self, page, row, content):
        """I7: only a page that somebody holds is written, and never what is registered."""
        held = self.naive.pages.get(page, ())
        assert self.naive.references[page] > 0
        assert row >= len(held) - 1 - self.naive.span(held) * self.size or not held
        assert all(page not in saved.extent for saved in self.naive.checkpoints.values())
        self.arena[page, row] = content

    def register_pages(self, prefix, computed, table):
        self.index.register_pages(self.keys(prefix), table, computed)
        self.naive.register(prefix[: computed // self.unit * self.unit + 1], table)

    def register_checkpoint(self, prefix, extent, kind):
        naive, known = self.naive, self.naive.checkpoints.get(prefix)
        key = self.keys(prefix)[-1]
        taken = self.index.register_checkpoint(key, len(prefix) - 1, extent, kind)
        assert taken == (known is None)
        if known is None:
            naive.checkpoints[prefix] = Saved(tuple(extent), kind, naive.age)
        else:
            known.last_use = naive.age
            known.kind = kind if known.kind == "moving" else known.kind
        naive.release(extent)

    def release(self, pages, checkpoint=None):
        self.index.release(pages, checkpoint)
        self.naive.release(pages)
        if checkpoint is not None:
            self.naive.release(checkpoint.extent)

    def recycle(self, prefix):
        saved = self.naive.checkpoints[prefix]
        is_free = saved.kind == "moving" and not saved.num_hits
        assert self.index.recycle(self.index.checkpoint_at(self.keys(prefix)[-1])) == is_free
        if is_free:
            del self.naive.checkpoints[prefix]

    def invalidate_all(self):
        self.index.invalidate_all()
        self.naive.pages.clear()
        self.naive.checkpoints.clear()

    def check_counts(self):
        """I10: every page is free, cached or active for both, and refers to as many."""
        naive, pool, cached = self.naive, self.pool, {*self.naive.cached()}
        assert (pool.num_active, pool.num_cached) == (naive.num_active(), len(cached))
        assert pool.num_free == pool.num_pages - naive.num_active() - len(cached)
        for page in range(pool.num_pages):
            assert pool.references(page) == naive.references[page]
            assert pool.is_cached(page) == (page in cached)

    def check_registered(self):
        """I1 for whatever is registered, reachable from the first page on."""
        for page, prefix in self.naive.pages.items():
            for end in range(self.naive.span(prefix) * self.size, len(prefix) - 1):
                assert self.arena[page, end % self.size] == prefix[: end + 2]
        for prefix in [*self.naive.pages.values(), *self.naive.checkpoints]:
            for end in self.naive.page_ends(len(prefix) - 1):
                assert self.naive.holders(prefix[: end + 1])


@pytest.fixture
def cache_world():
    """The class of the pair of index and dictionary."""
    return World
