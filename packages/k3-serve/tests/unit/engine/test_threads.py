"""Many threads on one engine: each gets its own answer, and nothing is left in use."""

import random
import threading
import time

import torch

from k3_core.engine import Request, Sampling
from k3_serve.engine.core import ContinuousEngine
from k3_serve.testing import tiny_model


def until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return condition()


def test_clients_that_come_and_go_leave_no_page_in_use():
    model = tiny_model(torch.float64)
    prompts = [tuple(range(10 + k % 3, 30 + k)) for k in range(12)]
    sampling = Sampling(max_tokens=6, temperature=0)
    with ContinuousEngine(model, unit=4, num_pages=90, max_batch=4, token_budget=24) as engine:
        alone = [engine.generate([Request(p, sampling)])[0].token_ids for p in prompts]
        wrong = []

        def client(seed):
            rng = random.Random(seed)
            for _ in range(4):
                k = rng.randrange(len(prompts))
                handle = engine.submit(Request(prompts[k], sampling, priority=rng.randrange(2)))
                if rng.random() < 0.4:
                    time.sleep(rng.random() * 0.02)
                    engine.abort(handle)
                events = list(handle)
                tokens = tuple(e.token_id for e in events if e.token_id is not None)
                is_whole = events[-1].finish_reason == "length" and tokens == alone[k]
                is_cut = events[-1].finish_reason == "abort" and tokens == alone[k][: len(tokens)]
                if not (is_whole or is_cut):
                    wrong.append((k, events))

        threads = [threading.Thread(target=client, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not wrong
        # A consumer sees the last event a moment before the engine lets go of the request.
        assert until(lambda: engine.stats().num_finished == len(prompts) + 32)
        stats, cache = engine.stats(), engine.cache_stats()
        assert stats.num_failed == stats.num_running == stats.num_waiting == 0
        assert cache.num_active == 0 and cache.num_free + cache.num_cached == 90
        assert set(engine._admission._queued.values()) == {0}


def test_closing_ends_what_runs_and_what_waits():
    engine = ContinuousEngine(tiny_model(), unit=4, num_pages=90, max_batch=1)
    handles = [engine.submit(Request((k, 2, 3), Sampling(max_tokens=150))) for k in range(3)]
    engine.close()
    assert [list(handle)[-1].finish_reason for handle in handles] == ["abort"] * 3
    assert engine.cache_stats().num_active == 0
