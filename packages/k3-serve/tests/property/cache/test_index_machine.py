"""The prefix index against a naive dictionary, over any history of requests (I1 to I12).

The dictionary remembers for every registered page and checkpoint the exact tokens of its prefix
and finds hits by trying all boundaries. A simulated arena remembers which prefix every row and
state was computed from, so a hit is checked for what it would feed to the model. Every eviction
is compared with everything that could have gone instead. I8 and I11 are the business of the
scheduler and of the tiers.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from k3_serve.cache import Checkpoint, StaleMatch

SYMBOLS = st.sampled_from([0, 0, 0, 1, 1, 2, "cat", "dog"])


@dataclass(eq=False)
class Running:
    """A request: its tokens, how many are computed, its page table, a checkpoint it holds."""

    prefix: tuple
    computed: int
    pages: list[int]
    held: Checkpoint | None = None


class CacheMachine(RuleBasedStateMachine):
    """Requests that start, advance, save states and leave, in any order and under pressure."""

    world_type: type

    @initialize(
        unit=st.sampled_from([2, 3, 1]),
        units_per_page=st.sampled_from([2, 1, 3, 1]),
        checkpoint_pages=st.sampled_from([1, 2, 3]),
        num_pages=st.sampled_from([12, 20, 8, 32, 48]),
        half_life=st.sampled_from([1.0, 8.0, 40.0]),
    )
    def set_up(self, unit, units_per_page, checkpoint_pages, num_pages, half_life):
        self.unit = unit
        self.extent_pages = checkpoint_pages
        self.world = self.world_type(num_pages, unit, units_per_page, checkpoint_pages, half_life)
        self.running: list[Running] = []
        self.plans: list = []  # (prefix, match) of look-ups that are claimed later
        self.version = 0
        self.texts: list[tuple] = [()]

    def remember(self, text):
        self.texts = [*self.texts[-7:], tuple(text)]

    def draw_prefix(self, data):
        """A prompt that mostly repeats, continues or branches off another one."""
        text = data.draw(st.sampled_from(self.texts))
        known = text[: max(len(text) - data.draw(st.sampled_from([0, 0, 0, 1, 2, 5])), 0)]
        tail = data.draw(st.lists(SYMBOLS, min_size=0 if known else 3, max_size=8))
        salt = data.draw(st.sampled_from(["", "", "", "", "", "tenant"]))
        self.remember((*known, *tail))
        return ((salt, self.version), *known, *tail)

    def pages_for(self, num_tokens):
        return -(-num_tokens // self.world.size)

    def begin(self, prefix, match):
        """Allocate the rest of a claimed request's pages and copy what it may not write."""
        world, hit = self.world, match.num_tokens
        shared = match.pages[: hit // world.size]
        own = world.allocate(self.pages_for(len(prefix) - 1) - len(shared))
        if own is None:
            world.release(match.pages, match.checkpoint)
            return None
        if hit:
            world.check_bytes(prefix[: hit + 1], match.pages, match.checkpoint.extent)
        if match.copy_source is not None:
            for row in range(hit % world.size):
                world.write(own[0], row, world.arena[match.copy_source, row])
            world.release([match.copy_source])
        request = Running(prefix, hit, [*shared, *own], match.checkpoint)
        self.running.append(request)
        return request

    def compute(self, request, stop, kind=None):
        """A forward up to `stop`, then registration; with a kind it ends in a checkpoint."""
        world, prefix = self.world, request.prefix
        if stop <= request.computed:
            return
        extent = None
        if kind is not None and stop % self.unit == 0:
            extent = world.allocate(self.extent_pages)
        for i in range(request.computed, stop):
            world.write(request.pages[i // world.size], i % world.size, prefix[: i + 2])
        for part, page in enumerate(extent or ()):
            world.write(page, 0, ("state", part, prefix[: stop + 1]))
        request.computed = stop
        world.register_pages(prefix, stop, request.pages)
        if extent is not None:
            world.register_checkpoint(prefix[: stop + 1], extent, kind)

    def leave(self, request):
        """Finish, abort and preemption give everything back alike."""
        self.running.remove(request)
        self.world.release(request.pages, request.held)

    @rule(data=st.data(), is_late=st.sampled_from([False, False, False, True]))
    def start(self, data, is_late):
        prefix = self.draw_prefix(data)
        match = self.world.look_up(prefix, len(prefix) - 2)
        if is_late:
            self.plans.append((prefix, match))
            return
        self.world.claim(prefix, match)
        self.begin(prefix, match)

    @rule(data=st.data(), is_held=st.booleans())
    def answer(self, data, is_held):
        """A whole prompt with checkpoints at its junction and its end (I9), then the rest."""
        prefix = self.draw_prefix(data)
        length = len(prefix) - 1
        match = self.world.look_up(prefix, length - 1)
        self.world.claim(prefix, match)
        request = self.begin(prefix, match)
        if request is None:
            return
        last = (length - 1) // self.unit * self.unit
        if match.junction is not None:
            self.compute(request, match.junction, "junction")
        self.compute(request, last, "prompt")
        self.compute(request, length)
        assert self.world.look_up(prefix, length - 1).num_latent_tokens == last
        if not is_held:
            self.leave(request)

    @precondition(lambda self: self.plans)
    @rule()
    def claim_late(self):
        """A match made some time ago is claimed whole or refused whole."""
        prefix, match = self.plans.pop(0)
        naive, hit = self.world.naive, match.num_tokens
        ends = naive.page_ends(hit)
        is_valid = all(
            page in naive.holders(prefix[: end + 1])
            for page, end in zip(match.pages, ends, strict=True)
        )
        if hit:
            key = self.world.keys(prefix[: hit + 1])[-1]
            is_valid &= self.world.index.checkpoint_at(key) is match.checkpoint
        try:
            self.world.claim(prefix, match)
        except StaleMatch:
            assert not is_valid
            return
        assert is_valid
        self.begin(prefix, match)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), count=st.integers(1, 8), kind=st.sampled_from(["turn", "moving", None]))
    def advance(self, data, count, kind):
        """The next tokens of a prompt, or some that are generated."""
        request = data.draw(st.sampled_from(self.running))
        if request.computed == len(request.prefix) - 1:
            request.prefix += tuple(data.draw(st.lists(SYMBOLS, min_size=1, max_size=2)))
            self.remember(request.prefix[1:])
            missing = self.pages_for(len(request.prefix) - 1) - len(request.pages)
            more = self.world.allocate(missing)
            if more is None:
                self.leave(request)
                return
            request.pages += more
        stop = min(request.computed + count, len(request.prefix) - 1)
        if kind is not None and stop // self.unit * self.unit > request.computed:
            stop = stop // self.unit * self.unit
        self.compute(request, stop, kind)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), kind=st.sampled_from(["turn", None]))
    def overtake(self, data, kind):
        """A request that computed the same prefix at the same time goes on, the first leaves."""
        first = data.draw(st.sampled_from(self.running))
        tail = data.draw(st.lists(SYMBOLS, max_size=6))
        prefix = (*first.prefix[: first.computed + 1], *tail)
        if len(prefix) == 1:
            return
        self.remember(prefix[1:])
        nothing = self.world.look_up(prefix, 0)
        self.world.claim(prefix, nothing)
        second = self.begin(prefix, nothing)
        if second is not None:
            self.compute(second, first.computed, kind)
            self.compute(second, (len(prefix) - 1) // self.unit * self.unit, kind)
        self.leave(first)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data):
        self.leave(data.draw(st.sampled_from(self.running)))

    @precondition(lambda self: any(request.held for request in self.running))
    @rule()
    def restored(self):
        """The states of all running requests are copied; their checkpoints may go."""
        for request in self.running:
            self.world.release([], request.held)
            request.held = None

    @precondition(lambda self: self.world.naive.checkpoints)
    @rule(data=st.data())
    def recycle(self, data):
        self.world.recycle(data.draw(st.sampled_from([*self.world.naive.checkpoints])))

    @rule(share=st.integers(1, 4))
    def squeeze(self, share):
        """Somebody takes a part of what can be had, and gives it back."""
        pool = self.world.pool
        self.world.release(self.world.allocate((pool.num_free + pool.num_cached) * share // 4))

    @precondition(lambda self: self.world.naive.checkpoints)
    @rule(odds=st.integers(0, 9))
    def update_weights(self, odds):
        if odds:
            return
        self.version += 1
        self.world.invalidate_all()
        for request in list(self.running):
            self.leave(request)

    @invariant()
    def counts_agree(self):
        self.world.check_counts()

    @invariant()
    def what_is_registered_is_true(self):
        self.world.check_registered()

    @invariant()
    def every_text_is_found_as_far_as_the_dictionary_has_it(self):
        for text in self.texts:
            self.world.look_up((("", self.version), *text), len(text))

    def teardown(self):
        """I10: nothing stays referred to, and every page can be had again."""
        if not hasattr(self, "world"):
            return
        for request in list(self.running):
            self.leave(request)
        assert self.world.pool.num_active == 0
        self.world.allocate(self.world.pool.num_pages)
        assert not self.world.naive.pages and not self.world.naive.checkpoints


def run(world_type, max_examples):
    options = settings(
        max_examples=max_examples,
        stateful_step_count=50,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    machine = type("Machine", (CacheMachine,), {"world_type": world_type})
    run_state_machine_as_test(machine, settings=options)


def test_any_history_agrees_with_the_dictionary(cache_world):
    run(cache_world, 60)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_histories_agree_with_the_dictionary(cache_world):
    run(cache_world, 600)
