"""The prefix index on histories small enough to follow by hand."""

from __future__ import annotations

from collections import Counter

import pytest

from k3_serve.cache import (
    EvictedCheckpoint,
    EvictedPages,
    OutOfPages,
    PagePool,
    PrefixIndex,
    StaleMatch,
    seed_key,
    unit_keys,
)

SEED = seed_key(0, "", "float32")


class Bench:
    """An index and the few steps that a scheduler does with it."""

    def __init__(self, num_pages=64, unit=4, page_tokens=4, checkpoint_pages=2, **options):
        self.pool = PagePool(num_pages)
        self.index = PrefixIndex(self.pool, unit, page_tokens, checkpoint_pages, **options)

    def keys(self, ids):
        return unit_keys(SEED, ids, self.index.unit)

    def lookup(self, ids, limit=None):
        return self.index.lookup(self.keys(ids), len(ids) - 1 if limit is None else limit)

    def store(self, ids, checkpoints=(), hold=False, kind="prompt"):
        """Compute `ids` cold, register it, take checkpoints at those lengths; returns the pages."""
        pages = self.index.allocate(-(-len(ids) // self.index.page_tokens))
        self.index.register_pages(self.keys(ids), pages, len(ids))
        for length in checkpoints:
            self.checkpoint(ids, length, kind)
        if not hold:
            self.index.release(pages)
        return pages

    def checkpoint(self, ids, length, kind="prompt"):
        extent = self.index.allocate(self.index.checkpoint_pages)
        key = self.keys(ids)[length // self.index.unit - 1]
        return self.index.register_checkpoint(key, length, extent, kind)


def test_a_hit_needs_latents_and_a_checkpoint_at_one_boundary():
    bench = Bench()
    ids = list(range(20))
    bench.store(ids, checkpoints=[8])
    match = bench.lookup(ids)
    assert (match.num_tokens, match.num_latent_tokens, len(match.pages)) == (8, 16, 2)
    assert match.checkpoint.num_tokens == 8


def test_latents_alone_are_no_hit():
    bench = Bench()
    bench.store(list(range(20)))
    match = bench.lookup(list(range(20)))
    assert (match.num_tokens, match.pages, match.checkpoint) == (0, (), None)
    assert match.junction == 16


def test_the_example_of_the_report():
    """2,800 shared tokens, hash blocks of 512 in pages of 6,144: the hit is 2,560 tokens."""
    bench = Bench(unit=512, page_tokens=6144)
    shared = list(range(2800))
    bench.store([*shared, *[7] * 5000], checkpoints=[2560])
    match = bench.lookup([*shared, *[8] * 5000])
    assert (match.num_tokens, len(match.pages)) == (2560, 1)
    assert match.copy_source == match.pages[0]


@pytest.mark.parametrize("length", [16, 17, 19, 20])
def test_the_same_prompt_hits_below_its_last_token(length):
    bench = Bench()
    ids = list(range(length))
    bench.store(ids, checkpoints=[(length - 1) // 4 * 4])
    match = bench.lookup(ids)
    assert match.num_tokens == (length - 1) // 4 * 4 <= length - 1
    assert match.junction is None


def test_siblings_hit_a_junction_from_the_third_on():
    bench = Bench()
    shared = list(range(16))
    first, second, third = ([*shared, *[tail] * 9] for tail in (50, 60, 70))
    bench.store(first, checkpoints=[24])
    assert bench.lookup(second).num_tokens == 0
    junction = bench.lookup(second).junction
    assert junction == 16
    bench.store(second, checkpoints=[junction], kind="junction")
    assert bench.lookup(third).num_tokens == 16


def test_a_partly_filled_page_is_found_and_its_endpoint_moves_on():
    bench = Bench(unit=4, page_tokens=16)
    ids = list(range(40))
    keys = bench.keys(ids)
    pages = bench.index.allocate(3)
    bench.index.register_pages(keys[:1], pages, 7)
    assert bench.lookup(ids).num_latent_tokens == 4
    bench.index.register_pages(keys[:3], pages, 12)
    assert bench.lookup(ids).num_latent_tokens == 12
    bench.index.register_pages(keys, pages, 40)
    assert bench.lookup(ids).num_latent_tokens == 36


def test_siblings_that_part_inside_a_page_have_a_page_each():
    bench = Bench(unit=4, page_tokens=16)
    first, second = [0] * 8 + [1] * 8, [0] * 8 + [2] * 8
    (a,) = bench.store(first, checkpoints=[8, 16])
    match = bench.lookup(second)
    assert (match.num_tokens, match.copy_source) == (8, a)
    (b,) = bench.store(second, checkpoints=[16])
    assert bench.lookup([*first, 9]).pages == (a,)
    assert bench.lookup([*second, 9]).pages == (b,)


def test_writing_a_shared_page_without_a_copy_is_refused():
    bench = Bench(unit=4, page_tokens=16)
    pages = bench.store([0] * 8 + [1] * 8, hold=True)
    with pytest.raises(ValueError, match="copy a shared page"):
        other = [0] * 8 + [2] * 8
        bench.index.register_pages(bench.keys(other), pages, 16)


def test_a_page_that_another_one_continues_is_given_back():
    bench = Bench(unit=4, page_tokens=16)
    (short,) = bench.store([0] * 8, checkpoints=[8])
    (long,) = bench.store([0] * 12)
    assert bench.lookup([0] * 12).pages == (long,)
    assert not bench.pool.is_cached(short)
    bench.index.allocate(bench.pool.num_free + bench.pool.num_cached)


def test_requests_that_compute_the_same_prefix_share_the_first_one_s_pages():
    bench = Bench()
    ids = list(range(16))
    pages = bench.store(ids, checkpoints=[12], hold=True)
    free = bench.pool.num_free
    bench.store(ids)
    assert bench.pool.num_free == free
    assert bench.lookup(ids).pages == tuple(pages[:3])


def test_pages_behind_the_last_checkpoint_go_first_then_the_cheapest_checkpoint():
    bench = Bench(num_pages=16, checkpoint_pages=2)
    events = []
    bench.store([1] * 16, checkpoints=[12])  # 4 + 2 pages, saves 12 tokens
    bench.store([2] * 8, checkpoints=[4])  # 2 + 2 pages, saves 4 tokens
    bench.index.on_evict = events.append
    bench.index.allocate(bench.pool.num_free + 2)
    assert [type(e) for e in events] == [EvictedPages, EvictedPages]
    assert [e.num_tokens for e in events] == [16, 8]
    bench.index.allocate(3)
    checkpoint, page = events[2:]
    assert isinstance(checkpoint, EvictedCheckpoint)
    assert (checkpoint.checkpoint.num_tokens, len(checkpoint.checkpoint.extent)) == (4, 2)
    assert (page.num_tokens, page.pages) == (4, checkpoint.pages)
    assert bench.lookup([1] * 16).num_tokens == 12


def test_a_checkpoint_is_worth_what_the_next_shallower_one_does_not_save():
    bench = Bench(num_pages=64, half_life=1e9)
    ids = list(range(40))
    bench.store(ids, checkpoints=[36])
    bench.store(list(range(100, 120)), checkpoints=[16])
    bench.checkpoint(ids, 32)  # now the one at 36 saves 4 tokens only
    events = []
    bench.index.on_evict = events.append
    while len(events) < 20:
        bench.index.allocate(bench.pool.num_free + 1)
        bench.pool.num_cached or events.extend([None] * 20)
    order = [e.checkpoint.num_tokens for e in events if isinstance(e, EvictedCheckpoint)]
    assert order == [36, 16, 32]


def test_an_old_checkpoint_loses_to_a_recent_one():
    bench = Bench(num_pages=32, half_life=4)
    bench.store([1] * 32, checkpoints=[28])
    for _ in range(8):
        bench.index.release(bench.index.allocate(2))
    bench.store([2] * 8, checkpoints=[4])
    events = []
    bench.index.on_evict = events.append
    bench.index.allocate(bench.pool.num_free + 4)
    assert [e.checkpoint.num_tokens for e in events if isinstance(e, EvictedCheckpoint)] == [28]


def test_claimed_pages_outlive_any_pressure_and_the_rest_can_be_had():
    bench = Bench(num_pages=20)
    ids = list(range(20))
    bench.store(ids, checkpoints=[16])
    match = bench.lookup(ids)
    bench.index.claim(match)
    taken = bench.index.allocate(bench.pool.num_free + bench.pool.num_cached)
    assert not {*match.pages, *match.checkpoint.extent} & {*taken}
    with pytest.raises(OutOfPages, match="1 pages were asked for and 0 of 20"):
        bench.index.allocate(1)
    assert bench.lookup(ids).num_tokens == 16
    bench.index.release(match.pages, match.checkpoint)
    bench.index.release(taken)
    assert bench.pool.num_active == 0


def test_a_match_that_was_evicted_meanwhile_is_refused_whole():
    bench = Bench(num_pages=12)
    ids = list(range(20))
    bench.store(ids, checkpoints=[16])
    match = bench.lookup(ids)
    bench.index.release(bench.index.allocate(12))
    with pytest.raises(StaleMatch):
        bench.index.claim(match)
    assert bench.pool.num_active == 0
    assert bench.index.counters.lookup_tokens == 0


def test_a_match_of_a_page_that_holds_something_else_by_now_is_refused():
    bench = Bench(unit=4, page_tokens=16, num_pages=8)
    ids = [0] * 8
    (short,) = bench.store(ids, checkpoints=[8])
    match = bench.lookup([*ids, 1])
    bench.store([*ids, *[1] * 8])  # continues the short page, which is free now
    pages = bench.index.allocate(bench.pool.num_free)
    assert short in pages and match.checkpoint.is_alive
    bench.index.register_pages(bench.keys([5] * 16), [short], 16)
    with pytest.raises(StaleMatch):
        bench.index.claim(match)


def test_idle_pages_under_a_continuation_of_somebody_else_can_be_had():
    """A registers the prefix, B computed it too and continues it, A leaves."""
    bench = Bench(num_pages=10)
    shared = list(range(12))
    bench.store(shared)
    longer = [*shared, 1, 2, 3, 4]
    pages = bench.store(longer, hold=True)
    assert (bench.pool.num_cached, bench.pool.num_active) == (3, 4)
    taken = bench.index.allocate(bench.pool.num_free + 1)
    assert bench.lookup(longer).num_latent_tokens == 8  # the last idle page went, no more
    taken += bench.index.allocate(2)
    assert bench.lookup(longer).num_latent_tokens == 0
    bench.index.register_pages(bench.keys(longer), pages, 16)
    assert bench.lookup(longer).num_latent_tokens == 12
    bench.index.release([*taken, *pages])
    assert bench.pool.num_active == 0


def test_a_moving_checkpoint_is_recycled_unless_somebody_used_it():
    bench = Bench()
    ids = list(range(20))
    bench.store(ids, checkpoints=[4, 8, 12], kind="moving")
    old, hit, promoted = (bench.index.checkpoint_at(bench.keys(ids)[i]) for i in (0, 1, 2))
    bench.index.claim(bench.lookup(ids[:9]))
    assert not bench.checkpoint(ids, 12, "turn")
    assert promoted.kind == "turn"
    free = bench.pool.num_free
    assert [bench.index.recycle(c) for c in (old, hit, promoted)] == [True, False, False]
    assert bench.pool.num_free == free + 2
    assert not bench.index.recycle(old)


def test_a_checkpoint_without_registered_latents_is_refused():
    bench = Bench()
    assert not bench.checkpoint(list(range(8)), 8)
    assert bench.pool.num_free == 64
    assert bench.index.counters.checkpoints_refused == 1


def test_new_weights_forget_everything_and_leave_running_requests_alone():
    bench = Bench()
    ids = list(range(20))
    pages = bench.store(ids, checkpoints=[8, 16], hold=True)
    match = bench.lookup(ids)
    bench.index.claim(match)
    bench.index.invalidate_all()
    assert bench.lookup(ids).num_latent_tokens == 0
    assert bench.pool.num_cached == 0
    bench.index.release(match.pages, match.checkpoint)
    bench.index.release(pages)
    assert bench.pool.num_free == 64


def test_counters_split_the_hit_rates():
    bench = Bench()
    ids = list(range(20))
    bench.store(ids, checkpoints=[8])
    bench.index.claim(bench.lookup(ids))
    bench.index.claim(bench.lookup([99] * 9))
    counters = bench.index.counters
    assert (counters.lookup_tokens, counters.latent_match_tokens, counters.hit_tokens) == (
        27,
        16,
        8,
    )
    assert (counters.checkpoint_hits, counters.checkpoint_misses) == (1, 1)
    assert (counters.uncached_common_prefix_tokens, counters.checkpoints_taken) == (8, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((4, 6, 1), "whole number of units"), ((0, 4, 1), "at least 1"), ((4, 4, 0), "at least 1")],
)
def test_impossible_sizes_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        PrefixIndex(PagePool(4), *arguments)


def test_wrong_registrations_are_refused():
    bench = Bench()
    ids = list(range(8))
    pages = bench.store(ids, hold=True)
    key = bench.keys(ids)[1]
    extent = bench.index.allocate(2)
    with pytest.raises(ValueError, match="the key names 8 tokens"):
        bench.index.register_checkpoint(key, 4, extent, "turn")
    with pytest.raises(ValueError, match="none of head, prompt"):
        bench.index.register_checkpoint(key, 8, extent, "other")
    with pytest.raises(ValueError, match="does not have 2 pages"):
        bench.index.register_checkpoint(key, 8, extent[:1], "turn")
    with pytest.raises(ValueError, match="need 2 keys and 2 pages"):
        bench.index.register_pages(bench.keys(ids), pages[:1], 8)


def test_a_branch_early_in_a_long_history_keeps_its_checkpoints():
    """Only what is needed goes: 30 checkpoints survive an edit of an early message."""
    bench = Bench(num_pages=400)
    history = list(range(124))
    bench.store(history, checkpoints=range(4, 124, 4), kind="turn")
    edited = [*history[:11], *[500] * 113]
    match = bench.lookup(edited)
    assert match.num_tokens == 8
    bench.index.claim(match)
    bench.store(edited, checkpoints=[120])
    assert bench.lookup(history).num_tokens == 120
    assert bench.index.counters.checkpoints_evicted == 0


def test_the_work_of_an_eviction_does_not_grow_with_the_pool():
    costs = []
    for num_pages in (400, 4000):
        bench = Bench(num_pages=num_pages)
        store, asked = bench.index._store, Counter()
        for name in ("_leaf_priority", "_checkpoint_priority"):
            count_calls(store, name, asked)
        for i in range(2 * num_pages // 10):
            bench.store([i] * 32, checkpoints=[28])
        evicted = bench.index.counters.pages_evicted + bench.index.counters.checkpoints_evicted
        assert evicted > num_pages // 2
        costs.append(asked.total() / evicted)
    assert costs[1] < 1.5 * costs[0] < 15


def count_calls(store, name, asked):
    original = getattr(store, name)

    def counting(item):
        asked[name] += 1
        return original(item)

    setattr(store, name, counting)
