"""A burst of long prompts beside short ones, on the scheduler with a clock of its own.

A step takes what one of k3-nano takes on two cores, so that the figures are the same everywhere:
what `k3 bench serve burst` measures, without the machine's noise.
"""

import random
from dataclasses import replace

import pytest

from k3_serve.cache import PagePool, PrefixIndex, seed_key
from k3_serve.engine.classes import CLASSES, classify
from k3_serve.engine.request import RequestState
from k3_serve.engine.scheduler import Scheduler

SEED = seed_key(0, "", "float32")
BURST = 10.0
ONE_CLASS = (replace(CLASSES[0], max_rows=CLASSES[-1].max_rows),)


def step_seconds(plan) -> float:
    """Fixed, by decode, by step with prompts, and by their rows, which read their past."""
    prompts = [one for one in plan.slices if one.num_tokens > 1]
    rows = sum(one.num_tokens * (1 + one.start / 2048) for one in prompts)
    decodes = len(plan.slices) - len(prompts)
    return 0.0012 + 0.00016 * decodes + 0.010 * bool(prompts) + 0.00014 * rows


def first_tokens(arrivals, classes, num_outputs=16) -> tuple[list[tuple[float, int, float]], float]:
    """(arrival, prompt, seconds to the first token) of each request, and when all have ended."""
    rng, now, found = random.Random(0), 0.0, []
    index = PrefixIndex(PagePool(6000), 64, 64, 4)
    scheduler = Scheduler(index, 8, 256, classes)
    queue, left, born = sorted(arrivals), {}, {}
    while queue or left:
        now = now if left else max(now, queue[0][0])
        while queue and queue[0][0] <= now:
            arrival, length = queue.pop(0)
            rows = [rng.randrange(50_000) for _ in range(length)]
            name = classify(length, classes=classes).name
            request = RequestState(str(len(born)), rows, name, 0, SEED)
            left[request], born[request] = num_outputs, arrival
            scheduler.add(request)
        plan = scheduler.schedule()
        now += step_seconds(plan) * rng.uniform(0.9, 1.25)
        drawn = [one.request for one in plan.slices if one.wants_logits]
        for request in drawn:
            if left[request] == num_outputs:
                found.append((born[request], request.num_prompt, now - born[request]))
            left[request] -= 1
        scheduler.complete(plan, dict.fromkeys(drawn, 1))
        for request in [r for r in drawn if left[r] == 0]:
            scheduler.remove(request)
            del left[request]
    return found, now


def slowdown(seed: int, classes=CLASSES) -> float:
    """Of the 95th percentile of short requests while 8 of 8,000 tokens are there."""
    rng, now, short = random.Random(seed), 0.0, []
    _, capacity = first_tokens([(0.0, 200)] * 64, classes)
    for _ in range(300):
        now += rng.expovariate(64 / capacity / 2)
        short.append((now, 200))
    alone, _ = first_tokens(short, classes)
    beside, _ = first_tokens(short + [(BURST, 8000)] * 8, classes)
    end = max(born + wait for born, length, wait in beside if length == 8000)

    def high(found):
        waits = sorted(w for b, length, w in found if length == 200 and BURST <= b <= end)
        return waits[int(0.95 * len(waits))]

    return high(beside) / high(alone)


@pytest.mark.parametrize("seed", range(4))
def test_short_requests_hardly_wait_for_a_burst_of_long_ones(seed):
    assert slowdown(seed) < 1.5


def test_without_classes_they_wait_for_all_of_it():
    assert slowdown(0, ONE_CLASS) > 10
