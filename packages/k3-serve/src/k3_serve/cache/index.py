"""Which prefixes the arena holds: look-up, claim, registration (report 5.4; architecture 6).

A hit needs two things at one boundary: the latent pages of all tokens before it and a checkpoint
of all KDA layers at it. Half a hit would be a silently wrong answer, so `lookup` only reports
boundaries that have both, and an eviction takes a checkpoint whole.

Order of a step, which keeps the rules of the cache:

1. `lookup(keys, len(prompt) - 1)` and `claim` for every request that starts; then `allocate`.
   A claimed page or checkpoint cannot be evicted.
2. Run the copies: `match.copy_source` into the request's own page, checkpoints into slots.
3. Run the forward, then copy states into extents.
4. `register_pages` and `register_checkpoint` what was written, never earlier: what is registered
   can be hit at once. Release the references of copy sources and restored checkpoints now.

A prompt of n tokens is registered, and its checkpoint taken, at (n - 1) // unit * unit, so that
the same prompt hits although its last token is always computed. Only the owner of an allocated
page writes it, and only behind its registered units; a claimed page or extent is only read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from k3_serve.cache.pages import OutOfPages, PagePool
from k3_serve.cache.records import (
    CHECKPOINT_KINDS,
    CacheCounters,
    Checkpoint,
    EvictedCheckpoint,
    EvictedPages,
    Match,
    StaleMatch,
)
from k3_serve.cache.store import PrefixStore


class PrefixIndex:
    """Prefix look-up over the pages of `pool`, whose eviction it owns.

    unit: tokens between two boundaries at which a prefix can end. page_tokens: latent rows of a
    page, a multiple of unit. checkpoint_pages: pages of a checkpoint's extent. half_life: of
    recency in allocated pages, see `evict`; one turnover of the pool by default.
    """

    def __init__(
        self,
        pool: PagePool,
        unit: int,
        page_tokens: int,
        checkpoint_pages: int,
        half_life: float | None = None,
    ) -> None:
        if unit < 1 or page_tokens < unit or page_tokens % unit:
            raise ValueError(
                f"page_tokens is {page_tokens} and unit {unit}; a page holds a whole number of "
                "units of at least 1 token"
            )
        if checkpoint_pages < 1:
            raise ValueError(f"checkpoint_pages is {checkpoint_pages}; an extent has at least 1")
        half_life = float(pool.num_pages) if half_life is None else half_life
        if half_life <= 0:
            raise ValueError(f"half_life is {half_life}; it is a positive number of pages")
        self.pool = pool
        self.unit = unit
        self.page_tokens = page_tokens
        self.checkpoint_pages = checkpoint_pages
        self._units_per_page = page_tokens // unit
        self._store = PrefixStore(pool, unit, self._units_per_page, half_life)

    @property
    def counters(self) -> CacheCounters:
        """Sums since the start."""
        return self._store.counters

    @property
    def on_evict(self) -> Callable[[EvictedCheckpoint | EvictedPages], None] | None:
        """Called with the bytes still intact, before their pages are given to anybody.

        It must not call the index. Not called when weights are updated or a state is recycled.
        """
        return self._store.on_evict

    @on_evict.setter
    def on_evict(self, hook: Callable[[EvictedCheckpoint | EvictedPages], None] | None) -> None:
        self._store.on_evict = hook

    # Look-up

    def lookup(self, keys: Sequence[bytes], limit: int) -> Match:
        """The longest usable prefix of at most `limit` tokens; changes nothing.

        keys: of the prompt's units. limit: prompt length - 1, since the last token is computed
        in any case for its logits. O(units of the prompt).
        """
        keys = keys[: max(limit, 0) // self.unit]
        path, num_units = self._store.tree.walk(keys)
        num_latent = num_units * self.unit
        while num_units and keys[num_units - 1] not in self._store.checkpoints:
            num_units -= 1
        if not num_units:
            return Match(0, (), None, num_latent, None, limit)
        size = self._units_per_page
        ends = [min(end, num_units) for end in range(size, num_units + size, size)]
        pages = tuple(node.page for node in path[: len(ends)])
        return Match(
            num_tokens=num_units * self.unit,
            pages=pages,
            checkpoint=self._store.checkpoints[keys[num_units - 1]],
            num_latent_tokens=num_latent,
            copy_source=pages[-1] if num_units % size else None,
            num_lookup_tokens=limit,
            keys=tuple(keys[end - 1] for end in ends),
        )

    def claim(self, match: Match) -> None:
        """Pin the pages and the checkpoint of a match, or raise StaleMatch and pin nothing.

        Also called for a match of 0 tokens, which counts the miss. The caller gives both back
        by `release`: the checkpoint after the step that restored it, the pages at the end.
        """
        checkpoint, tree = match.checkpoint, self._store.tree
        for page, key in zip(match.pages, match.keys, strict=True):
            node = tree.node(page)
            if node is None or node not in tree.holders(key):
                raise StaleMatch(f"page {page} of a match was evicted; look the prompt up again")
        if checkpoint is not None and not checkpoint.is_alive:
            raise StaleMatch(
                f"the checkpoint at {checkpoint.num_tokens} tokens of a match was evicted; "
                "look the prompt up again"
            )
        self._count(match)
        self.pool.pin(match.pages)
        if checkpoint is not None:
            self.pool.pin(checkpoint.extent)
            checkpoint.num_hits += 1
            checkpoint.last_use = self._store.age

    def _count(self, match: Match) -> None:
        counters = self.counters
        counters.lookup_tokens += match.num_lookup_tokens
        counters.latent_match_tokens += match.num_latent_tokens
        counters.hit_tokens += match.num_tokens
        counters.uncached_common_prefix_tokens += match.num_latent_tokens - match.num_tokens
        counters.checkpoint_hits += match.checkpoint is not None
        counters.checkpoint_misses += match.checkpoint is None

    def checkpoint_at(self, key: bytes) -> Checkpoint | None:
        """The checkpoint of the prefix that ends with `key`."""
        return self._store.checkpoints.get(key)

    def latents(self, keys: Sequence[bytes]) -> list[int]:
        """The pages that hold the first tokens of a prefix of `keys`, up to the first missing.

        The last one may hold more than the prefix has of it.
        """
        pages = []
        for end in range(
            self._units_per_page, len(keys) + self._units_per_page, self._units_per_page
        ):
            holders = self._store.tree.holders(keys[min(end, len(keys)) - 1])
            if not holders:
                break
            pages.append(holders[0].page)
        return pages

    # Pages in and out

    def allocate(self, count: int) -> list[int]:
        """`count` pages for the caller to write, evicting what is worth least (see `store`).

        Never fails when num_free + num_cached is enough; otherwise OutOfPages, and nothing
        changed.
        """
        available = self.pool.num_free + self.pool.num_cached
        if count > available:
            raise OutOfPages(count, available, self.pool.num_pages)
        while self.pool.num_free < count:
            self._store.evict_one()
        pages = self.pool.allocate(count)
        self._store.age += count
        return pages

    def release(self, pages: Iterable[int] = (), checkpoint: Checkpoint | None = None) -> None:
        """Give back references to pages (claimed or allocated) and to a claimed checkpoint."""
        self.pool.release(pages)
        if checkpoint is not None:
            self.pool.release(checkpoint.extent)

    def register_pages(self, keys: Sequence[bytes], pages: Sequence[int], num_tokens: int) -> None:
        """Make the whole units of the first `num_tokens` tokens of a request matchable.

        keys: of the request's units. pages: its page table, held by the caller. Everything
        before num_tokens is written. Units that are known keep the page that has them. A partly
        filled page is registered up to its last whole unit; a later call moves that endpoint on.
        O(new units).
        """
        num_units = num_tokens // self.unit
        size = self._units_per_page
        num_pages = -(-num_units // size)
        if len(keys) < num_units or len(pages) < num_pages:
            raise ValueError(
                f"{num_tokens} tokens need {num_units} keys and {num_pages} pages; "
                f"got {len(keys)} and {len(pages)}"
            )
        first = num_pages
        while first and keys[min(first * size, num_units) - 1] not in self._store.tree:
            first -= 1
        for index in range(first, num_pages):
            start = index * size
            stop = min(start + size, num_units)
            before = keys[start - 1] if start else None
            self._store.put_page(pages[index], start, keys[start:stop], before)

    # Checkpoints in and out

    def register_checkpoint(
        self, key: bytes, num_tokens: int, extent: Sequence[int], kind: str
    ) -> bool:
        """Make a written state matchable; the index takes over the caller's reference.

        key: of the last unit of the state's prefix. num_tokens: length of that prefix. extent:
        allocated pages. kind: one of CHECKPOINT_KINDS. False when the state is not needed, and
        then the extent is released: the prefix has a checkpoint already (a lasting kind replaces
        `moving`), or its latent pages are not registered.
        """
        checkpoint = Checkpoint(key, num_tokens, tuple(extent), kind)
        self._check(checkpoint)
        known = self.checkpoint_at(key)
        if known is None and key in self._store.tree:
            self._store.put_checkpoint(checkpoint)
            self.counters.checkpoints_taken += 1
            return True
        if known is not None:
            known.last_use = self._store.age
            known.kind = kind if known.kind == "moving" else known.kind
        self.counters.checkpoints_refused += 1
        self.pool.release(checkpoint.extent)
        return False

    def _check(self, checkpoint: Checkpoint) -> None:
        """Raise ValueError when the arguments of a registration cannot be true."""
        kind, extent, key = checkpoint.kind, checkpoint.extent, checkpoint.key
        if kind not in CHECKPOINT_KINDS:
            raise ValueError(f"checkpoint kind {kind!r} is none of {', '.join(CHECKPOINT_KINDS)}")
        if len(extent) != self.checkpoint_pages or len(set(extent)) != len(extent):
            raise ValueError(f"extent {extent} does not have {self.checkpoint_pages} pages")
        for node in self._store.tree.holders(key):
            expected = (node.start + node.keys.index(key) + 1) * self.unit
            if checkpoint.num_tokens != expected:
                raise ValueError(
                    f"num_tokens is {checkpoint.num_tokens}; the key names {expected} tokens"
                )

    def recycle(self, checkpoint: Checkpoint) -> bool:
        """Free a superseded `moving` checkpoint; False when it stays because others use it."""
        is_needed = checkpoint.kind != "moving" or checkpoint.num_hits
        if is_needed or not checkpoint.is_alive:
            return False
        self.counters.checkpoints_recycled += 1
        self._store.drop_checkpoint(checkpoint)
        return True

    def invalidate_all(self) -> None:
        """Forget every prefix, as after an update of the weights; pages in use stay in use."""
        self._store.clear()
