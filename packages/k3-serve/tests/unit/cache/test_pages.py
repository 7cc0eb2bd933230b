"""Reference counts of pages."""

from __future__ import annotations

import pytest

from k3_serve.cache import OutOfPages, PagePool


def counts(pool):
    return pool.num_free, pool.num_active, pool.num_cached


def test_a_page_goes_from_free_to_active_and_back():
    pool = PagePool(4)
    pages = pool.allocate(3)
    assert len({*pages}) == 3 and counts(pool) == (1, 3, 0)
    pool.pin(pages[:1])
    pool.release(pages)
    assert counts(pool) == (3, 1, 0) and pool.references(pages[0]) == 1
    pool.release(pages[:1])
    assert counts(pool) == (4, 0, 0)


def test_a_kept_page_is_cached_at_its_last_release_and_can_be_pinned_again():
    pool = PagePool(4)
    idle = []
    pool.on_idle = idle.append
    pages = pool.allocate(2)
    pool.keep(pages)
    pool.release(pages)
    assert counts(pool) == (2, 0, 2) and idle == pages
    assert pool.oldest_cached() == pages[0]
    pool.pin(pages[:1])
    assert counts(pool) == (2, 1, 1) and not pool.is_cached(pages[0])
    pool.forget(pages)
    assert counts(pool) == (3, 1, 0)
    pool.release(pages[:1])
    assert counts(pool) == (4, 0, 0) and idle == pages


def test_too_many_pages_change_nothing():
    pool = PagePool(2)
    with pytest.raises(OutOfPages, match="3 pages were asked for and 2 of 2"):
        pool.allocate(3)
    assert counts(pool) == (2, 0, 0)
    assert pool.allocate(0) == []


def test_wrong_uses_are_refused_and_pin_is_all_or_nothing():
    pool = PagePool(3)
    (page,) = pool.allocate(1)
    with pytest.raises(ValueError, match="is free"):
        pool.pin([page, (page + 1) % 3])
    assert pool.references(page) == 1
    pool.release([page])
    for action in (pool.release, pool.keep):
        with pytest.raises(ValueError, match=f"page {page} "):
            action([page])
    for outside in (-1, 3):
        with pytest.raises(ValueError, match=r"not in 0\.\.2"):
            pool.release([outside])
    with pytest.raises(ValueError, match="cannot be negative"):
        pool.allocate(-1)
    with pytest.raises(ValueError, match="num_pages is 0"):
        PagePool(0)
