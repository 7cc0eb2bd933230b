"""Random arrivals, aborts and suspensions over few slots and shared prefixes.

Whatever happens to the others, a request's tokens are those of straight generation (serving 5B,
rows 32 and 40).
"""

import time
from itertools import islice

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from k3_core.engine import Request, Sampling, SimpleEngine
from k3_core.engine.sampling import choose_rows

PREFIX = (3, 1, 4, 1, 5, 9)
# (tokens shared with the others, own last token, tokens wanted, what is done to it, after tokens)
REQUESTS = st.lists(
    st.tuples(
        st.integers(0, len(PREFIX)),
        st.integers(0, 39),
        st.integers(1, 9),
        st.sampled_from(["keep", "abort", "suspend"]),
        st.integers(0, 4),
    ),
    min_size=1,
    max_size=8,
)


def straight(model, prompt, sampling):  # type: ignore[no-untyped-def]
    ids = list(prompt)
    for _ in range(sampling.max_tokens):
        ids += choose_rows(model.row(ids)[None], [sampling], [len(ids)], [None])
    return ids[len(prompt) :]


def follow(engine, handle, action, num_seen):  # type: ignore[no-untyped-def]
    """All tokens of a request that is aborted, or suspended and resumed, in mid-course."""
    stream = iter(handle)
    events = list(islice(stream, num_seen))
    if action == "abort":
        engine.abort(handle)
    elif action == "suspend":
        try:
            resumed = engine.resume(engine.suspend(handle))
        except ValueError as error:
            assert "has ended" in str(error)  # it was faster
        else:
            *generated, last = [*events, *stream]
            assert (last.token_id, last.finish_reason) == (None, "suspended")
            events, stream = generated, iter(resumed)
    events += stream
    return [e.token_id for e in events if e.token_id is not None], events[-1].finish_reason


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plan=REQUESTS, num_slots=st.integers(1, 3), chunk=st.integers(1, 5))
def test_every_request_gets_its_own_tokens(fake_model, letters, plan, num_slots, chunk) -> None:  # type: ignore[no-untyped-def]
    fake_model.gate = lambda: time.sleep(3e-4)  # or all would end before anything is done to them
    requests = [
        Request((*PREFIX[:shared], own), Sampling(length, temperature=1.0, seed=own, top_p=0.9))
        for shared, own, length, _, _ in plan
    ]
    with SimpleEngine(fake_model, letters, max_batch=num_slots, prefill_chunk=chunk) as engine:
        handles = [engine.submit(request) for request in requests]
        for request, handle, (*_, action, num_seen) in zip(requests, handles, plan, strict=True):
            tokens, reason = follow(engine, handle, action, num_seen)
            expected = straight(fake_model, request.token_ids, request.sampling)
            assert tokens == expected[: len(tokens)]
            assert len(tokens) == len(expected) or reason == "abort" == action
    stats = engine.stats()
    assert (stats.num_failed, stats.num_running, stats.num_waiting) == (0, 0, 0)


def test_a_fault_of_the_engine_ends_what_runs_and_nothing_else(fake_model, letters, caplog) -> None:  # type: ignore[no-untyped-def]
    sampling = Sampling(max_tokens=4, temperature=0)
    with SimpleEngine(fake_model, letters, max_batch=1) as engine:
        step, engine._step = engine._step, lambda: 1 / 0  # type: ignore[method-assign]
        failed = engine.generate([Request(PREFIX, sampling), Request(PREFIX, sampling)])
        assert {one.finish_reason for one in failed} == {"error"}
        assert {one.error for one in failed} == {"ZeroDivisionError in the engine"}
        assert engine.is_alive
        for _ in range(2):
            engine.generate([Request(PREFIX, sampling)])
        assert not engine.is_alive  # nothing but faults
        engine._step = step  # type: ignore[method-assign]
        (done,) = engine.generate([Request(PREFIX, sampling)])
        assert list(done.token_ids) == straight(fake_model, PREFIX, sampling)
        while engine.stats().num_running:  # the last event comes before the end of its step
            time.sleep(1e-3)
        assert engine.is_alive
        assert engine.num_restarts >= 3
        stats = engine.stats()
        assert (stats.num_finished, stats.num_failed, stats.num_running) == (5, 4, 0)
    assert not engine.is_alive
    assert "the engine begins anew after ZeroDivisionError" in caplog.text
    assert "division by zero" not in caplog.text
