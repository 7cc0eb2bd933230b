"""A fault of the engine itself: every request ends, the cache is empty, the next one is right."""

import torch

from k3_core.engine import Request, Sampling
from k3_serve.engine.core import ContinuousEngine
from k3_serve.testing import tiny_model

GREEDY = Sampling(max_tokens=6, temperature=0)
PROMPT = tuple(range(40, 90))


def test_the_engine_begins_anew_after_a_fault() -> None:
    torch.set_num_threads(1)
    options = {"unit": 16, "num_pages": 64, "max_batch": 2}
    with ContinuousEngine(tiny_model(), **options) as engine:
        (before,) = engine.generate([Request(PROMPT, GREEDY)])
        schedule = engine._scheduler.schedule

        def fault() -> None:
            raise AssertionError("a fault of the scheduler")

        engine._scheduler.schedule = fault  # type: ignore[method-assign,assignment]
        handles = [engine.submit(Request(PROMPT, GREEDY)) for _ in range(3)]
        ends = [list(handle)[-1] for handle in handles]
        assert {end.finish_reason for end in ends} <= {"error", "length"}
        assert ends[0].error == "AssertionError in the engine"
        assert engine._scheduler.schedule != schedule
        (after,) = engine.generate([Request(PROMPT, GREEDY)])
        assert after.token_ids == before.token_ids
        assert engine.is_alive
        assert engine.num_restarts == 1
        assert engine._admission._queued == dict.fromkeys(engine._admission._queued, 0)
        cache = engine.cache_stats()
        assert cache.num_free + cache.num_cached + cache.num_active == 64
