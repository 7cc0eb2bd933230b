"""Which prefixes the arena holds, and what goes when it is full (report 5.4; architecture 6).

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

Only the owner of an allocated page writes it, and only behind its registered units; a claimed
page or extent is only read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from k3_serve.cache.evict import EvictionQueue, log_value
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
from k3_serve.cache.tree import PageNode, PageTree


class PrefixIndex:
    """Prefix look-up over the pages of `pool`, whose eviction it owns.

    unit: tokens between two boundaries at which a prefix can end. page_tokens: latent rows of a
    page, a multiple of unit. checkpoint_pages: pages of a checkpoint's extent. half_life: in
    allocated pages, see `evict`; one turnover of the pool by default.
    on_evict: called with bytes still intact, before their pages are given to anybody; it must
    not call the index.
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
        self.pool = pool
        self.unit = unit
        self.page_tokens = page_tokens
        self.checkpoint_pages = checkpoint_pages
        self.half_life = float(half_life or pool.num_pages)
        self.counters = CacheCounters()
        self.on_evict: Callable[[EvictedCheckpoint | EvictedPages], None] | None = None
        self._age = 0
        self._tree = PageTree(page_tokens // unit)
        self._checkpoints: dict[bytes, Checkpoint] = {}
        self._extents: dict[int, Checkpoint] = {}  # by first page
        self._leaves: EvictionQueue[PageNode] = EvictionQueue()
        self._cheapest: EvictionQueue[Checkpoint] = EvictionQueue()
        pool.on_idle = self._offer_page

    # Look-up

    def lookup(self, keys: Sequence[bytes], limit: int) -> Match:
        """The longest usable prefix of at most `limit` tokens; changes nothing.

        keys: of the prompt's units. limit: prompt length - 1, since the last token is computed
        in any case for its logits. O(units of the prompt).
        """
        keys = keys[: max(limit, 0) // self.unit]
        path, num_units = self._tree.walk(keys)
        num_latent = num_units * self.unit
        while num_units and keys[num_units - 1] not in self._checkpoints:
            num_units -= 1
        if not num_units:
            return Match(0, (), None, num_latent, None, limit)
        size = self._tree.units_per_page
        ends = [min(end, num_units) for end in range(size, num_units + size, size)]
        pages = tuple(node.page for node in path[: len(ends)])
        return Match(
            num_tokens=num_units * self.unit,
            pages=pages,
            checkpoint=self._checkpoints[keys[num_units - 1]],
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
        checkpoint = match.checkpoint
        nodes = []
        for page, key in zip(match.pages, match.keys, strict=True):
            node = self._tree.node(page)
            if node is None or node not in self._tree.holders(key):
                raise StaleMatch(f"page {page} of a match was evicted; look the prompt up again")
            nodes.append(node)
        if checkpoint is not None and not checkpoint.is_alive:
            raise StaleMatch(f"the checkpoint at {checkpoint.num_tokens} tokens was evicted")
        self._count(match)
        self.pool.pin(match.pages)
        for node in nodes:
            node.last_use = self._age
        if checkpoint is not None:
            self.pool.pin(checkpoint.extent)
            checkpoint.num_hits += 1
            checkpoint.last_use = self._age

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
        return self._checkpoints.get(key)

    # Allocation and eviction

    def allocate(self, count: int) -> list[int]:
        """`count` pages for the caller to write, evicting what is worth least.

        Pages that no checkpoint makes usable go first, the longest unused leaf before others;
        then the checkpoint of the lowest value, whole, which may leave further such pages. Never
        fails when num_free + num_cached is enough; otherwise OutOfPages, and nothing changed.
        """
        available = self.pool.num_free + self.pool.num_cached
        if count > available:
            raise OutOfPages(count, available, self.pool.num_pages)
        while self.pool.num_free < count:
            self._evict_one()
        self._age += count
        return self.pool.allocate(count)

    def _evict_one(self) -> None:
        leaf = self._leaves.pop(self._leaf_priority)
        if leaf is not None:
            self._evict_page(leaf)
            return
        checkpoint = self._cheapest.pop(self._checkpoint_priority)
        if checkpoint is not None:
            self._evict_checkpoint(checkpoint)
            return
        self._evict_below_pinned()

    def _evict_page(self, node: PageNode) -> None:
        self.counters.pages_evicted += 1
        if self.on_evict is not None:
            num_tokens = (node.start + len(node.keys)) * self.unit
            self.on_evict(EvictedPages(node.keys[-1], num_tokens, (node.page,)))
        self._drop_page(node)

    def _evict_checkpoint(self, checkpoint: Checkpoint) -> None:
        self.counters.checkpoints_evicted += 1
        if self.on_evict is not None:
            key = checkpoint.key
            path = self._tree.path(self._tree.holders(key)[0])
            keys = (*(node.keys[-1] for node in path[:-1]), key)
            self.on_evict(EvictedCheckpoint(checkpoint, tuple(n.page for n in path), keys))
        self._drop_checkpoint(checkpoint)

    def _evict_below_pinned(self) -> None:
        """Free an idle page under whose prefix others still hold pages.

        It happens when two requests compute the same prefix at once: the pages of the first are
        registered, the second continues them with its own and outlives it. Those pages stay
        with their owner, but nobody can reach them by a look-up any more.
        """
        page = self.pool.oldest_cached()
        assert page is not None
        node = self._tree.node(page)
        assert node is not None, "idle extents were evicted before"
        for below in reversed(self._tree.subtree(node)):
            for checkpoint in self._checkpoints_of(below):
                if len(self._tree.holders(checkpoint.key)) == 1:
                    self._evict_checkpoint(checkpoint)
            self._evict_page(below)

    # Registration

    def register_pages(self, keys: Sequence[bytes], pages: Sequence[int], num_tokens: int) -> None:
        """Make the whole units of the first `num_tokens` tokens of a request matchable.

        keys: of the request's units. pages: its page table, held by the caller. Everything
        before num_tokens is written. Units that are known keep the page that has them. A partly
        filled page is registered up to its last whole unit; a later call moves that endpoint on.
        O(new units).
        """
        num_units = num_tokens // self.unit
        size = self._tree.units_per_page
        num_pages = -(-num_units // size)
        if len(keys) < num_units or len(pages) < num_pages:
            raise ValueError(
                f"{num_tokens} tokens need {num_units} keys and {num_pages} pages; "
                f"got {len(keys)} and {len(pages)}"
            )
        first = num_pages
        while first and keys[min(first * size, num_units) - 1] not in self._tree:
            first -= 1
        for index in range(first, num_pages):
            start = index * size
            before = keys[start - 1] if start else None
            self._put(pages[index], start, keys[start : min(start + size, num_units)], before)

    def _put(self, page: int, start: int, keys: Sequence[bytes], before: bytes | None) -> None:
        if page in self._extents:
            raise ValueError(f"page {page} belongs to a checkpoint and cannot hold latents")
        self.pool.keep((page,))
        node = self._tree.put(page, start, keys, before)
        node.num_checkpoints = sum(key in self._checkpoints for key in node.keys)
        node.last_use = self._age
        for other in self._tree.redundant(node):
            self._drop_page(other)

    def register_checkpoint(
        self, key: bytes, num_tokens: int, extent: Sequence[int], kind: str
    ) -> bool:
        """Make a written state matchable; the index takes over the caller's reference.

        key: of the last unit of the state's prefix. num_tokens: length of that prefix. extent:
        allocated pages. kind: one of CHECKPOINT_KINDS. False when the state is not needed, and
        then the extent is released: the prefix has a checkpoint already (a lasting kind replaces
        `moving`), or its latent pages are not registered.
        """
        extent = tuple(extent)
        self._check_checkpoint(key, num_tokens, extent, kind)
        known = self._checkpoints.get(key)
        if known is not None or key not in self._tree:
            if known is not None:
                known.last_use = self._age
                known.kind = kind if known.kind == "moving" else known.kind
            self.counters.checkpoints_refused += 1
            self.pool.release(extent)
            return False
        above = next((k for k in self._tree.keys_above(key) if k in self._checkpoints), None)
        checkpoint = Checkpoint(key, num_tokens, extent, kind, last_use=self._age)
        checkpoint.above = self._checkpoints[above] if above is not None else None
        self._checkpoints[key] = checkpoint
        self._extents[extent[0]] = checkpoint
        for node in self._tree.holders(key):
            node.num_checkpoints += 1
            self._put_above_deeper(checkpoint, node)
        self.counters.checkpoints_taken += 1
        self.pool.keep(extent)
        self.pool.release(extent)
        return True

    def _check_checkpoint(self, key: bytes, num_tokens: int, extent: tuple, kind: str) -> None:
        if kind not in CHECKPOINT_KINDS:
            raise ValueError(f"checkpoint kind {kind!r} is none of {', '.join(CHECKPOINT_KINDS)}")
        if len(extent) != self.checkpoint_pages or len(set(extent)) != len(extent):
            raise ValueError(f"extent {extent} does not have {self.checkpoint_pages} pages")
        for node in self._tree.holders(key):
            expected = (node.start + node.keys.index(key) + 1) * self.unit
            if num_tokens != expected:
                raise ValueError(f"num_tokens is {num_tokens}; the key names {expected} tokens")

    def _put_above_deeper(self, checkpoint: Checkpoint, node: PageNode) -> None:
        """Tell the nearest deeper checkpoints that they save fewer tokens now.

        A new end of a chain has none; a junction walks the branches behind it.
        """
        todo = [(node, node.keys.index(checkpoint.key) + 1)]
        while todo:
            node, first = todo.pop()
            for key in node.keys[first:]:
                deeper = self._checkpoints.get(key)
                if deeper is not None:
                    deeper.above = checkpoint
                    self._offer_checkpoint(deeper)
                    break
            else:
                todo.extend((child, 0) for child in node.children)

    # Giving back

    def release(self, pages: Iterable[int] = (), checkpoint: Checkpoint | None = None) -> None:
        """Give back references to pages (claimed or allocated) and to a claimed checkpoint."""
        self.pool.release(pages)
        if checkpoint is not None:
            self.pool.release(checkpoint.extent)

    def recycle(self, checkpoint: Checkpoint) -> bool:
        """Free a superseded `moving` checkpoint; False when it stays since others use it."""
        is_needed = checkpoint.kind != "moving" or checkpoint.num_hits
        if is_needed or not checkpoint.is_alive:
            return False
        self.counters.checkpoints_recycled += 1
        self._drop_checkpoint(checkpoint)
        return True

    def invalidate_all(self) -> None:
        """Forget every prefix, as after an update of the weights; pages in use stay in use."""
        for checkpoint in list(self._checkpoints.values()):
            self._drop_checkpoint(checkpoint)
        for node in sorted(self._tree.nodes(), key=lambda node: -node.start):
            self._drop_page(node)

    # Shared by the above

    def _checkpoints_of(self, node: PageNode) -> list[Checkpoint]:
        return [self._checkpoints[key] for key in node.keys if key in self._checkpoints]

    def _drop_page(self, node: PageNode) -> None:
        self._tree.remove(node)
        self._leaves.discard(node)
        self.pool.forget((node.page,))
        if node.parent is not None:
            self._offer_leaf(node.parent)

    def _drop_checkpoint(self, checkpoint: Checkpoint) -> None:
        checkpoint.is_alive = False
        del self._checkpoints[checkpoint.key]
        del self._extents[checkpoint.extent[0]]
        self._cheapest.discard(checkpoint)
        self.pool.forget(checkpoint.extent)
        for node in self._tree.holders(checkpoint.key):
            node.num_checkpoints -= 1
            self._offer_leaf(node)

    def _offer_page(self, page: int) -> None:
        """The pool says that a registered page became idle."""
        node = self._tree.node(page)
        if node is not None:
            node.last_use = self._age
            self._offer_leaf(node)
        elif page in self._extents:
            self._offer_checkpoint(self._extents[page])

    def _offer_leaf(self, node: PageNode) -> None:
        priority = self._leaf_priority(node)
        if priority is not None:
            self._leaves.push(node, priority)

    def _offer_checkpoint(self, checkpoint: Checkpoint) -> None:
        priority = self._checkpoint_priority(checkpoint)
        if priority is not None:
            self._cheapest.push(checkpoint, priority)

    def _leaf_priority(self, node: PageNode) -> float | None:
        return float(node.last_use) if node.is_leaf and self.pool.is_cached(node.page) else None

    def _checkpoint_priority(self, checkpoint: Checkpoint) -> float | None:
        if not self.pool.is_cached(checkpoint.extent[0]):
            return None
        saved = checkpoint.saved_tokens
        return log_value(saved, len(checkpoint.extent), checkpoint.last_use, self.half_life)
