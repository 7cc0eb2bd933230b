"""A lasting checkpoint at the end of a prompt's stable head, which its siblings hit at once."""

import pytest

from k3_core.engine import Request, Sampling, Suspended
from k3_serve.testing import SteppedEngine, tiny_model

ONE = Sampling(max_tokens=1, temperature=0)
HEAD = tuple(range(50, 73))


@pytest.fixture
def engine():
    return SteppedEngine(tiny_model(), unit=4, num_pages=300, token_budget=64)


def cached(engine, ids, **fields):
    handle = engine.submit(Request(tuple(ids), ONE, **fields))
    engine.run()
    return handle.num_cached_tokens


def test_the_second_chat_with_a_head_hits_its_last_whole_unit(engine):
    assert cached(engine, (*HEAD, *range(30)), num_head_tokens=len(HEAD)) == 0
    kinds = {c.num_tokens: c.kind for c in engine._scheduler.index._store.checkpoints.values()}
    assert kinds[20] == "head"
    assert cached(engine, (*HEAD, *range(100, 130)), num_head_tokens=len(HEAD)) == 20


def test_without_a_head_the_second_sighting_has_no_state(engine):
    assert cached(engine, (*HEAD, *range(30))) == 0
    assert cached(engine, (*HEAD, *range(100, 130))) == 0


def test_a_head_that_is_the_whole_prompt_ends_before_its_last_token(engine):
    assert cached(engine, HEAD[:20], num_head_tokens=20) == 0
    assert cached(engine, HEAD[:20], num_head_tokens=20) == 16


def test_a_suspended_request_keeps_its_head():
    state = Suspended(Request(HEAD, ONE, num_head_tokens=9), ())
    assert Suspended.from_json(state.to_json()).request.num_head_tokens == 9
