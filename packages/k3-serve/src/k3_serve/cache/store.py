"""What the arena holds at the moment, and what goes when it is full (report 5.4; architecture 6).

A latent page is useful only below a checkpoint, and a checkpoint only on top of its pages. So

- a page never goes before the pages and checkpoints that stand on it;
- pages behind the last checkpoint of their chain go first, the longest unused leaf before others;
- then the checkpoint of the lowest value goes, whole, which may leave further such pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from k3_serve.cache.evict import EvictionQueue, log_value
from k3_serve.cache.pages import PagePool
from k3_serve.cache.records import CacheCounters, Checkpoint, EvictedCheckpoint, EvictedPages
from k3_serve.cache.tree import PageNode, PageTree


class PrefixStore:
    """Registered pages and checkpoints with their eviction queues.

    pool: reference counts; a page that is registered is kept there. age: pages allocated so far,
    the clock of recency. half_life: of recency, in allocated pages. on_evict: see `PrefixIndex`.
    """

    def __init__(self, pool: PagePool, unit: int, units_per_page: int, half_life: float) -> None:
        self.pool = pool
        self.unit = unit
        self.half_life = half_life
        self.age = 0
        self.counters = CacheCounters()
        self.on_evict: Callable[[EvictedCheckpoint | EvictedPages], None] | None = None
        self.tree = PageTree(units_per_page)
        self.checkpoints: dict[bytes, Checkpoint] = {}
        self._extents: dict[int, Checkpoint] = {}  # by first page
        self._leaves: EvictionQueue[PageNode] = EvictionQueue()
        self._cheapest: EvictionQueue[Checkpoint] = EvictionQueue()
        pool.on_idle = self._on_idle

    # Adding

    def put_page(self, page: int, start: int, keys: Sequence[bytes], before: bytes | None) -> None:
        """Register `page` for the units `keys` behind `start` units, or move its endpoint on."""
        if page in self._extents:
            raise ValueError(f"page {page} belongs to a checkpoint and cannot hold latents")
        self.pool.keep((page,))
        node = self.tree.put(page, start, keys, before)
        node.num_checkpoints = sum(key in self.checkpoints for key in node.keys)
        for other in self.tree.redundant(node):
            self._drop_page(other)

    def put_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Register a checkpoint whose prefix is registered; takes the caller's reference."""
        key, extent = checkpoint.key, checkpoint.extent
        above = next((k for k in self.tree.keys_above(key) if k in self.checkpoints), None)
        checkpoint.above = self.checkpoints[above] if above is not None else None
        checkpoint.last_use = self.age
        self.checkpoints[key] = checkpoint
        self._extents[extent[0]] = checkpoint
        for node in self.tree.holders(key):
            node.num_checkpoints += 1
            self._put_above_deeper(checkpoint, node)
        self.pool.keep(extent)
        self.pool.release(extent)

    def _put_above_deeper(self, checkpoint: Checkpoint, node: PageNode) -> None:
        """Tell the nearest deeper checkpoints that they save fewer tokens now.

        A new end of a chain has none; a junction walks the branches behind it.
        """
        todo = [(node, node.keys.index(checkpoint.key) + 1)]
        while todo:
            node, first = todo.pop()
            for key in node.keys[first:]:
                deeper = self.checkpoints.get(key)
                if deeper is not None:
                    deeper.above = checkpoint
                    self._offer_checkpoint(deeper)
                    break
            else:
                todo.extend((child, 0) for child in node.children)

    # Evicting

    def evict_one(self) -> None:
        """Free at least one cached page, of which there must be one."""
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
            path = self.tree.path(self.tree.holders(key)[0])
            keys = (*(node.keys[-1] for node in path[:-1]), key)
            self.on_evict(EvictedCheckpoint(checkpoint, tuple(n.page for n in path), keys))
        self.drop_checkpoint(checkpoint)

    def _evict_below_pinned(self) -> None:
        """Free an idle page under whose prefix others still hold pages.

        It happens when two requests compute the same prefix at once: the pages of the first are
        registered, the second continues them with its own and outlives it. Those pages stay
        with their owner, but no look-up reaches them until the owner registers them again.
        """
        page = self.pool.oldest_cached()
        assert page is not None, "the caller counted the cached pages"
        oldest = self.tree.node(page)
        assert oldest is not None, "idle extents are evicted before"
        idle = [n for n in self.tree.subtree(oldest) if self.pool.is_cached(n.page)]
        for node in reversed(self.tree.subtree(idle[-1])):
            for key in node.keys:
                if key in self.checkpoints:
                    self._evict_checkpoint(self.checkpoints[key])
            self._evict_page(node)

    # Dropping

    def drop_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Unregister a checkpoint whole; its pages are free once nobody reads them."""
        checkpoint.is_alive = False
        del self.checkpoints[checkpoint.key]
        del self._extents[checkpoint.extent[0]]
        self._cheapest.discard(checkpoint)
        self.pool.forget(checkpoint.extent)
        for node in self.tree.holders(checkpoint.key):
            node.num_checkpoints -= 1
            self._offer_leaf(node)

    def _drop_page(self, node: PageNode) -> None:
        self.tree.remove(node)
        self._leaves.discard(node)
        self.pool.forget((node.page,))
        if node.parent is not None:
            self._offer_leaf(node.parent)

    def clear(self) -> None:
        """Unregister everything."""
        for checkpoint in list(self.checkpoints.values()):
            self.drop_checkpoint(checkpoint)
        for node in sorted(self.tree.nodes(), key=lambda node: -node.start):
            self._drop_page(node)

    # Candidates: whatever can be evicted is queued the moment that it can be

    def _on_idle(self, page: int) -> None:
        """The pool says that a registered page lost its last reference."""
        node = self.tree.node(page)
        if node is not None:
            node.last_use = self.age
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
        saved, size = checkpoint.saved_tokens, len(checkpoint.extent)
        return log_value(saved, size, checkpoint.last_use, self.half_life)
