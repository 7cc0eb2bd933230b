"""The scheduler without a model: budgets, pages, fairness and order over long random runs."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3_serve.cache import PagePool, PrefixIndex, seed_key
from k3_serve.engine.classes import RequestClass
from k3_serve.engine.request import RequestState
from k3_serve.engine.scheduler import Scheduler

SEED = seed_key(0, "", "float32")
CLASSES = (
    RequestClass("short", 16, 4, 1.0, 1 << 20),
    RequestClass("medium", 48, 2, 0.75, 1 << 20),
    RequestClass("long", 1 << 30, 1, 0.5, 1 << 20),
)


class Script:
    """A scripted backend: every request generates a number of random tokens, and may fail.

    It checks each plan against its own records of what is computed and who holds which page.
    """

    def __init__(
        self, rng, *, pages=70, unit=4, per_page=2, extent=2, slots=4, budget=24, drafts=False
    ):
        self.rng, self.budget, self.drafts, self.num_rejected = rng, budget, drafts, 0
        self.index = PrefixIndex(PagePool(pages), unit, unit * per_page, extent)
        self.scheduler = Scheduler(self.index, slots, budget, CLASSES)
        self.unit, self.page_tokens, self.slots = unit, unit * per_page, slots
        self.left, self.computed, self.done = {}, {}, Counter()
        self.served = Counter()

    def add(self, num_rows, num_tokens, priority=0, alphabet=2):
        rows = [self.rng.randrange(alphabet)] * (num_rows // 2)
        rows += [self.rng.randrange(alphabet) for _ in range(num_rows - len(rows))]
        kind = next(c.name for c in CLASSES if num_rows <= c.max_rows)
        request = RequestState(str(len(self.left)), rows, kind, priority, SEED)
        self.left[request] = num_tokens
        self.scheduler.add(request)
        return request

    def step(self, is_failing=False):
        for request in self.left:
            count = self.rng.randrange(4) if self.drafts and request.is_decoding else 0
            request.draft = tuple(self.rng.randrange(2) for _ in range(count))
        plan = self.scheduler.schedule()
        self.check(plan)
        if is_failing:
            self.scheduler.fail(plan)
            assert not any(r.is_running for r in plan.admitted), "its slot was never filled"
            return plan
        tokens, accepted, ended, broken = {}, {}, [], []
        for one in plan.slices:
            self.served[one.request.request_class] += one.num_tokens
            if one.wants_logits:
                if self.rng.random() < 0.01:
                    broken.append(one.request)
                    continue
                most = min(len(one.draft), self.left[one.request] - 1)
                kept = self.rng.randint(0, most) if most else 0
                accepted[one.request] = one.draft[:kept]
                tokens[one.request] = self.rng.randrange(2)
                self.left[one.request] -= 1 + kept
                self.num_rejected += len(one.draft) - kept
                if self.left[one.request] == 0:
                    ended.append(one.request)
        before = {one.request: list(one.request.rows) for one in plan.slices}
        tokens_of = {request: [token] for request, token in tokens.items()}
        self.scheduler.complete(plan, tokens, broken, accepted)
        for one in plan.slices:
            new = [*accepted.get(one.request, ()), *tokens_of.get(one.request, ())]
            assert one.request.rows == before[one.request] + new
            self.check_saves(plan, one)
        for request in ended + broken:
            self.remove(request)
            self.done[request.request_class] += 1
        return plan

    def check_saves(self, plan, one):
        """A state that the slot did not come to is not in the index under the key of it."""
        for save in plan.saves:
            if save.request is one.request and save.num_tokens > one.request.num_computed:
                found = self.index.checkpoint_at(save.key)
                assert found is None or found.extent != save.extent

    def remove(self, request):
        self.scheduler.remove(request)
        del self.left[request]

    def check(self, plan):
        assert plan.slices or not self.left, "nothing to do although requests are there"
        assert plan.num_tokens <= self.budget
        slots = [one.slot for one in plan.slices]
        assert len(set(slots)) == len(slots) and all(0 <= s < self.slots for s in slots)
        restored = {r.slot: r.num_tokens for r in plan.restores}
        admitted = {r.slot for r in plan.admitted}
        assert set(restored) == admitted
        read = {p for r in plan.restores for p in r.extent or ()}
        sources = Counter(source for source, _ in plan.page_copies)
        written = [p for save in plan.saves for p in save.extent]
        written += [destination for _, destination in plan.page_copies]
        assert len(set(written)) == len(written) and not (read | set(sources)) & set(written)
        for one in plan.slices:
            assert one.start == restored.get(one.slot, one.request.num_computed) < one.stop
            given_ = one.stop - len(one.draft)
            assert given_ == len(one.request.rows) or given_ % self.unit == 0  # I8
            assert one.wants_logits == (given_ == len(one.request.rows))
            assert len(one.pages) * self.page_tokens >= one.stop
            own = one.pages[one.start // self.page_tokens :]
            # Where a request writes, it is alone, but for copies that are taken before.
            assert all(self.index.pool.references(page) == 1 + sources[page] for page in own)
            assert not set(own) & (read | {p for save in plan.saves for p in save.extent})
        for one in plan.decodes:
            assert one.num_tokens == 1 + len(one.draft) and one.start > 0
            assert one.draft == one.request.draft[: len(one.draft)]
            assert (one.stop - 1) // self.unit == one.start // self.unit, "it stays in its unit"
        for save in plan.saves:
            (one,) = [s for s in plan.slices if s.request is save.request]
            assert one.start < save.num_tokens <= one.stop and save.num_tokens % self.unit == 0
        pool = self.index.pool
        assert pool.num_free + pool.num_cached + pool.num_active == pool.num_pages

    def drain(self, max_steps=20_000):
        for _ in range(max_steps):
            if not self.left:
                return
            self.step()
        raise AssertionError(f"{len(self.left)} requests do not end: {self.scheduler.counts}")


def churn(seed, num_steps, **sizes):
    rng = random.Random(seed)
    script = Script(rng, **sizes)
    longest = script.scheduler.max_length
    for _ in range(num_steps):
        if len(script.left) < 12 and rng.random() < 0.4:
            num_tokens = rng.randint(1, min(40, longest - 1))
            script.add(rng.randint(1, longest - num_tokens), num_tokens, rng.choice([0, 0, 0, 1]))
        if script.left and rng.random() < 0.02:
            script.remove(rng.choice(list(script.left)))
        if script.left:
            script.step(is_failing=rng.random() < 0.01)
    script.drain()
    assert script.index.pool.num_active == 0
    assert script.scheduler.counts == (0, 0)
    return script


def test_5000_steps_leave_no_page_in_use():
    script = churn(1, 5_000)
    counters = script.index.counters
    assert (
        len(script.done) == 3
        and min(script.done.values()) > 5
        and script.scheduler.num_preemptions > 20
    )
    assert counters.hit_tokens > 1_000 and counters.checkpoints_evicted > 100


def test_3000_steps_with_drafts_leave_no_page_in_use():
    script = churn(7, 3_000, drafts=True)
    assert script.num_rejected > 500 and script.scheduler.num_preemptions > 20
    assert script.index.counters.hit_tokens > 1_000


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_100000_steps_leave_no_page_in_use():
    churn(2, 100_000)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    pages=st.integers(12, 60),
    per_page=st.integers(1, 4),
    extent=st.integers(1, 4),
    slots=st.integers(1, 5),
    spare_budget=st.integers(0, 40),
    drafts=st.booleans(),
)
def test_any_sizes_conserve_pages_and_end(
    seed, pages, per_page, extent, slots, spare_budget, drafts
):
    churn(
        seed,
        120,
        drafts=drafts,
        pages=pages,
        per_page=per_page,
        extent=extent,
        slots=slots,
        budget=slots + 4 + spare_budget,
    )


def test_classes_share_a_step_by_their_weights():
    script = Script(random.Random(0), pages=2_000, slots=8, budget=112)
    for _ in range(8):
        script.add(16, 1, alphabet=50)
        script.add(400, 1, alphabet=50)
    script.add(48, 1, alphabet=50)
    plan = script.step()
    given_ = Counter()
    for one in plan.slices:
        given_[one.request.request_class] += one.num_tokens
    assert given_ == {"short": 64, "medium": 32, "long": 16}  # 4 : 2 : 1


def test_a_decoding_short_request_keeps_long_chunks_at_their_share():
    script = Script(random.Random(0), pages=2_000, slots=8, budget=112)
    short = script.add(8, 60, alphabet=50)
    script.step()
    long = script.add(800, 1, alphabet=50)
    plan = script.step()
    assert {one.request: one.num_tokens for one in plan.slices} == {short: 1, long: 20}  # 1 of 5
    script.remove(short)
    (alone,) = script.step().slices
    assert alone.num_tokens == 108  # the time of 112 short rows, as others may come back


def test_deep_chunks_are_brief_until_shorter_requests_have_been_away_for_long():
    script = Script(random.Random(0), pages=4_000, slots=8, budget=112)
    long = script.add(12_000, 1, alphabet=50)
    script.step()
    assert long.num_computed == 112
    short = script.add(8, 1, alphabet=50)
    while short in script.left:
        script.step()
    steps = []
    while long in script.left:
        (one,) = script.step().slices
        steps.append((one.start, one.num_tokens))
    brief = [(start, count) for start, count in steps[:-1] if count < 112]
    assert steps[0] in brief and 15 * 112 < sum(n * (1 + s / 2048) for s, n in brief) < 17 * 112
    assert all(count == 112 for _, count in steps[len(brief) : -1])


def test_a_burst_of_long_prompts_leaves_slots_and_tokens_to_short_ones():
    script = Script(random.Random(0), pages=2_000, slots=4, budget=24)
    for _ in range(8):
        script.add(800, 30, alphabet=50)
    running = [script.step() and script.scheduler.counts[1] for _ in range(200)]
    assert max(running) == 2, "the long class holds at most half of the slots"
    short = script.add(16, 1, alphabet=50)
    for _ in range(2):
        script.step()
    assert short not in script.left


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1 << 30), favourite=st.integers(0, 2))
def test_no_class_starves_beside_an_endless_stream_of_another(seed, favourite):
    """Two requests of one class wait beside a stream that alone would fill every slot."""
    rng = random.Random(seed)
    script = Script(rng, pages=60, slots=3, budget=16)
    lengths = (12, 40, 120)
    rare = [script.add(lengths[(favourite + k) % 3], 6, alphabet=50) for k in (1, 2)]
    for _ in range(1_500):
        while len(script.left) < 10:
            script.add(lengths[favourite], rng.randint(1, 6), alphabet=50)
        script.step()
        if not any(request in script.left for request in rare):
            return
    raise AssertionError([r.request_class for r in rare if r in script.left])


def test_a_higher_priority_takes_the_slot_of_a_lower_one():
    script = Script(random.Random(3), slots=1)
    low = script.add(20, 50)
    for _ in range(3):
        script.step()
    high = script.add(8, 2, priority=1)
    plan = script.step()
    assert [one.request for one in plan.slices] == [high] and plan.preempted == (low,)
    script.drain()
    assert script.done.total() == 2


def test_a_preempted_request_resumes_from_its_latest_checkpoint():
    script = Script(random.Random(4), slots=1)
    low = script.add(20, 50, alphabet=50)
    for _ in range(10):
        script.step()
    boundary = low.num_computed // 4 * 4
    script.add(4, 1, priority=1, alphabet=50)
    script.step()
    plan = script.step()
    (restore,) = plan.restores
    assert restore.num_tokens == boundary and plan.slices[0].start == boundary


def test_a_failed_step_is_repeated_one_request_at_a_time():
    script = Script(random.Random(5))
    requests = [script.add(12, 3, alphabet=50) for _ in range(3)]
    script.step()
    assert len(script.step(is_failing=True).slices) == 3
    alone = [script.step().slices for _ in range(3)]
    assert [len(slices) for slices in alone] == [1, 1, 1]
    assert {slices[0].request for slices in alone} == set(requests)
    assert len(script.step().slices) > 1 or not script.left


def test_checkpoints_are_taken_at_the_prompt_the_turn_and_where_siblings_part():
    script = Script(random.Random(6), pages=300)
    trunk = [100 + i for i in range(24)]
    kinds = []
    for tail in (1, 2, 3):
        request = RequestState(str(tail), [*trunk, *[tail] * 8], "short", 0, SEED)
        script.left[request] = 9
        script.scheduler.add(request)
        while request in script.left:
            kinds += [(save.kind, save.num_tokens) for save in script.step().saves]
    assert ("prompt", 28) in kinds, "the last unit that leaves a token to compute"
    assert kinds.count(("junction", 24)) == 1, "taken at the second sighting"
    assert request.num_cached == 24, "and hit at the third"
    keys = request.unit_keys(4)
    assert script.index.checkpoint_at(keys[40 // 4 - 1]).kind == "turn"


def test_a_budget_too_small_for_a_unit_is_refused():
    index = PrefixIndex(PagePool(20), 16, 16, 2)
    with pytest.raises(ValueError, match=r"token_budget is 17.*at least 20"):
        Scheduler(index, 4, 17)
