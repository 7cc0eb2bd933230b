"""The one allocator of the cache: reference counts of the arena's pages (report 5.4).

Pages of MLA latents and extents of KDA checkpoints come from the same free list. A page is

- free: nobody refers to it and the index does not know it;
- active: at least one request refers to it;
- cached: nobody refers to it and the index keeps it, so that a later request can hit it.

The pool knows nothing of prefixes. `PrefixIndex` tells it which pages to keep and decides which
cached page becomes free; everybody else allocates through the index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable


class OutOfPages(Exception):
    """More pages were asked for than are free. Nothing was allocated."""

    def __init__(self, count: int, available: int, num_pages: int) -> None:
        super().__init__(
            f"{count} pages were asked for and {available} of {num_pages} can be had; "
            "preempt a request, wait for one to finish, or give the cache more memory"
        )


class PagePool:
    """Reference counts of pages 0..num_pages-1.

    on_idle: called with a kept page when its last reference goes (active -> cached).
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages is {num_pages}; a pool has at least 1 page")
        self.num_pages = num_pages
        self.on_idle: Callable[[int], None] | None = None
        self._free = list(range(num_pages - 1, -1, -1))
        self._references = [0] * num_pages
        self._kept = [False] * num_pages
        self._cached: dict[int, None] = {}  # in the order in which they became idle

    @property
    def num_free(self) -> int:
        """Pages that hold nothing."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Pages that only the index keeps; all of them can be evicted."""
        return len(self._cached)

    @property
    def num_active(self) -> int:
        """Pages that a request refers to."""
        return self.num_pages - len(self._free) - len(self._cached)

    def references(self, page: int) -> int:
        """How often `page` is referred to; 0 for a free or cached one."""
        self._check(page)
        return self._references[page]

    def is_cached(self, page: int) -> bool:
        """Whether only the index keeps `page`."""
        return page in self._cached

    def oldest_cached(self) -> int | None:
        """The cached page that has been idle longest, None when there is none."""
        return next(iter(self._cached), None)

    def allocate(self, count: int) -> list[int]:
        """Take `count` free pages, each with one reference. OutOfPages changes nothing."""
        if count < 0:
            raise ValueError(f"count is {count}; the number of pages cannot be negative")
        if count > len(self._free):
            raise OutOfPages(count, len(self._free), self.num_pages)
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def pin(self, pages: Iterable[int]) -> None:
        """Add a reference to each page, which must be active or cached. All pages or none."""
        pages = list(pages)
        for page in pages:
            self._check(page)
            if not self._references[page] and page not in self._cached:
                raise ValueError(f"page {page} is free; only allocated or cached pages are pinned")
        for page in pages:
            self._references[page] += 1
            self._cached.pop(page, None)

    def release(self, pages: Iterable[int]) -> None:
        """Drop a reference of each page; at zero a kept page is cached, another one free."""
        for page in pages:
            self._check(page)
            if not self._references[page]:
                raise ValueError(f"page {page} has no reference left; it was released twice")
            self._references[page] -= 1
            if self._references[page]:
                continue
            if not self._kept[page]:
                self._free.append(page)
                continue
            self._cached[page] = None
            if self.on_idle is not None:
                self.on_idle(page)

    def keep(self, pages: Iterable[int]) -> None:
        """The index registers active pages: they will not become free at their release."""
        for page in pages:
            if not self.references(page):
                raise ValueError(f"page {page} is not active; register pages while holding them")
            self._kept[page] = True

    def forget(self, pages: Iterable[int]) -> None:
        """The index drops pages: cached ones are free at once, active ones at their release."""
        for page in pages:
            self._check(page)
            self._kept[page] = False
            if page in self._cached:
                del self._cached[page]
                self._free.append(page)

    def _check(self, page: int) -> None:
        if not 0 <= page < self.num_pages:
            raise ValueError(f"page {page} is not in 0..{self.num_pages - 1}")
