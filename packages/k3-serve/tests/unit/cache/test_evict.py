"""The value of a checkpoint and the queue over it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3_serve.cache.evict import EvictionQueue, log_value


@pytest.mark.parametrize("age", [0, 10, 1_000_000_000_000])
def test_the_logarithm_orders_as_saved_tokens_times_recency_per_page(age):
    """The order at any later time is that of the values at that time."""
    cases = [(64, 3, 100), (4096, 3, 0), (128, 1, 80), (64, 2, 120), (1_000_000, 254, 30)]
    half_life = 20.0

    def value(saved, pages, last_use):
        return saved / pages * 2 ** (-(150 - last_use) / half_life)

    moved = [(saved, pages, last_use + age) for saved, pages, last_use in cases]
    order = sorted(range(5), key=lambda i: value(*cases[i]))
    assert sorted(range(5), key=lambda i: log_value(*moved[i], half_life)) == order
    assert log_value(64, 4, 0, 1.0) == math.log2(16)


@given(
    st.lists(
        st.tuples(st.sampled_from(["set", "discard", "pop"]), st.integers(0, 5), st.integers(0, 9))
    )
)
def test_the_queue_gives_the_lowest_current_priority(actions):
    queue: EvictionQueue[int] = EvictionQueue()
    current: dict[int, float] = {}
    for action, item, priority in actions:
        if action == "set":
            lowered = priority < current.get(item, math.inf)
            current[item] = priority
            if lowered:  # an increase is noticed without a push
                queue.push(item, priority)
        elif action == "discard":
            current.pop(item, None)
            queue.discard(item)
        else:
            lowest = min(current.values(), default=None)
            taken = queue.pop(current.get)
            assert (taken is None) == (lowest is None)
            assert taken is None or current.pop(taken) == lowest
        assert len(queue) == len(current)


def test_an_item_that_cannot_go_is_asked_again_when_it_is_pushed():
    queue: EvictionQueue[str] = EvictionQueue()
    queue.push("pinned", 1.0)
    assert queue.pop(lambda item: None) is None
    assert queue.pop(lambda item: 1.0) is None
    queue.push("pinned", 1.0)
    assert queue.pop(lambda item: 1.0) == "pinned"


def test_dead_entries_do_not_pile_up():
    queue: EvictionQueue[int] = EvictionQueue()
    for i in range(10_000):
        queue.push(i, float(i))
        queue.discard(i)
        queue.push(-1, -float(i))
    assert len(queue._heap) < 100
