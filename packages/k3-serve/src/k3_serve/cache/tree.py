"""The registered latent pages as a tree: which page holds which unit of which prefix.

A page holds up to `page_tokens / unit` units. Every unit's key is an endpoint at which a look-up
may end, so a hit is a multiple of the unit and not of the page, and a partly filled page is
found under its last whole unit and moves on as it fills (report 5.4, partial registration).

Two rules keep the tree small. Closure: when a key is held, so are the keys of all shorter
prefixes. No page is redundant: a page whose units another page holds too is not registered.
Hence the last key of a page names it, and a full page is the only parent of its successors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(eq=False)
class PageNode:
    """One registered page. start: units before it. keys: of its units, in order."""

    page: int
    start: int
    keys: list[bytes]
    parent: PageNode | None
    children: set[PageNode] = field(default_factory=set)
    num_checkpoints: int = 0
    """Checkpoints at its units."""
    last_use: int = 0
    """When it became idle, in pages allocated by the index so far."""

    @property
    def is_leaf(self) -> bool:
        """Whether nothing that is registered needs this page."""
        return not self.children and not self.num_checkpoints


class PageTree:
    """Pages by their units' keys. Knows neither the pool nor checkpoints."""

    def __init__(self, units_per_page: int) -> None:
        self.units_per_page = units_per_page
        self._nodes: dict[int, PageNode] = {}
        self._holders: dict[bytes, list[PageNode]] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, key: bytes) -> bool:
        return key in self._holders

    def node(self, page: int) -> PageNode | None:
        """The node of a page, None when it is not registered."""
        return self._nodes.get(page)

    def nodes(self) -> list[PageNode]:
        """All registered pages."""
        return list(self._nodes.values())

    def holders(self, key: bytes) -> Sequence[PageNode]:
        """Pages that hold the unit of `key`; more than one only where siblings part in a page."""
        return self._holders.get(key, ())

    def walk(self, keys: Sequence[bytes]) -> tuple[list[PageNode], int]:
        """Pages of the longest known prefix of `keys` and its units.

        Whole pages by their last unit, then the deepest endpoint inside the next one.
        """
        path: list[PageNode] = []
        size = self.units_per_page
        for start in range(0, len(keys), size):
            for stop in range(min(start + size, len(keys)), start, -1):
                holders = self.holders(keys[stop - 1])
                if holders:
                    path.append(holders[0])
                    break
            else:
                return path, start
            if stop < start + size:
                return path, stop
        return path, len(path) * size

    def path(self, node: PageNode) -> list[PageNode]:
        """The pages from the root to `node`."""
        path = [node]
        while path[-1].parent is not None:
            path.append(path[-1].parent)
        return path[::-1]

    def keys_above(self, key: bytes) -> Iterator[bytes]:
        """Keys of the shorter prefixes of `key`, longest first."""
        node: PageNode | None = self._holders[key][0]
        assert node is not None
        yield from reversed(node.keys[: node.keys.index(key)])
        while (node := node.parent) is not None:
            yield from reversed(node.keys)

    def put(self, page: int, start: int, keys: Sequence[bytes], before: bytes | None) -> PageNode:
        """Register `page` as the holder of `keys`, or move its endpoint on.

        start: units before the page. before: key of the unit before the page, None for the first.
        """
        node = self._nodes.get(page)
        if node is None:
            parent = self._holders[before][0] if before is not None else None
            node = PageNode(page, start, [], parent)
            self._nodes[page] = node
            if parent is not None:
                parent.children.add(node)
        elif node.start != start or list(keys[: len(node.keys)]) != node.keys:
            raise ValueError(
                f"page {page} already holds another prefix ({node.start + len(node.keys)} units); "
                "copy a shared page before writing it"
            )
        for key in keys[len(node.keys) :]:
            node.keys.append(key)
            self._holders.setdefault(key, []).append(node)
        return node

    def redundant(self, node: PageNode) -> list[PageNode]:
        """Other pages all of whose units `node` holds."""
        return [
            other
            for key in node.keys
            for other in self.holders(key)
            if other is not node and other.keys[-1] == key
        ]

    def remove(self, node: PageNode) -> None:
        """Unregister a page without children."""
        assert not node.children, "children hold longer prefixes and go first"
        del self._nodes[node.page]
        if node.parent is not None:
            node.parent.children.discard(node)
        for key in node.keys:
            holders = self._holders[key]
            holders.remove(node)
            if not holders:
                del self._holders[key]

    def subtree(self, node: PageNode) -> list[PageNode]:
        """`node` and everything below it, shorter prefixes first."""
        order = [node]
        for parent in order:  # grows while it is walked
            order.extend(parent.children)
        return order
