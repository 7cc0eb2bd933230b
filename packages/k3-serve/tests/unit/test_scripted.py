"""The scripted engine keeps the protocol, and groups of tokens change no answer."""

from __future__ import annotations

import asyncio

import pytest

from k3_core.engine import Request, Sampling
from k3_serve.testing import LOGPROB, Script, ScriptedEngine

ANSWER = (
    "hm<|close|>think<|sep|><|open|>response<|sep|>n\u00e4\U0001f642 STOP it"
    "<|close|>response<|sep|><|end_of_msg|>"
)


def ask(engine, **sampling):  # type: ignore[no-untyped-def]
    (completion,) = engine.generate([Request((1, 2), Sampling(**sampling))])
    return completion


def test_tokens_logprobs_and_the_end_are_those_of_the_script(tokenizer) -> None:  # type: ignore[no-untyped-def]
    engine = ScriptedEngine(tokenizer, [Script([5, 6, 7], logprobs=(-1.0, -2.0), finish="stop")])
    whole = ask(engine, top_logprobs=2)
    assert (whole.token_ids, whole.finish_reason) == ((5, 6, 7), "stop")
    assert whole.logprobs == (-1.0, -2.0, LOGPROB)
    assert whole.top_logprobs[0] == ((5, -1.0), (6, -2.0))
    assert (ask(engine, max_tokens=2).finish_reason, ask(engine).finish_reason) == (
        "length",
        "stop",
    )
    assert ask(engine, stop_ids=(6,)).token_ids == (5, 6)


@pytest.mark.parametrize("fields", [{"finish": "error"}, {"error": "no luck"}])
def test_a_script_may_fail(tokenizer, fields) -> None:  # type: ignore[no-untyped-def]
    completion = ask(ScriptedEngine(tokenizer, [Script([5], **fields)]))
    assert (completion.token_ids, completion.finish_reason) == ((5,), "error")
    assert completion.error == fields.get("error")


def test_a_span_comes_when_the_one_before_was_taken(tokenizer) -> None:  # type: ignore[no-untyped-def]
    engine = ScriptedEngine(tokenizer, [Script(range(9), spans=(4, 1, 2))])
    handle = engine.submit(Request((1,)))
    seen = []
    for event in handle:
        seen.append((event.token_id, engine.stats().num_generated_tokens))
    given = [4] * 4 + [5] + [7] * 2 + [9] * 2
    assert seen == list(enumerate(given))


def test_what_holds_ends_when_it_is_aborted(tokenizer) -> None:  # type: ignore[no-untyped-def]
    engine = ScriptedEngine(tokenizer, [Script([5, 6], spans=(1,), delay=0.001, holds=True)])

    async def read() -> list[str | None]:
        handle = engine.submit(Request((1,)))
        reasons = []
        async for event in handle:
            reasons.append(event.finish_reason)
            if event.token_id == 6:
                engine.abort(handle)
        return reasons

    assert asyncio.run(read()) == [None, None, "abort"]
    assert engine.aborted == ["request-0"] and engine.stats().num_running == 0


def test_a_suspended_request_goes_on_where_it_was(tokenizer) -> None:  # type: ignore[no-untyped-def]
    engine = ScriptedEngine(tokenizer, [Script([5, 6, 7], spans=(2, 1))])
    handle = engine.submit(Request((1,)))
    assert next(iter(handle)).token_id == 5
    suspended = engine.suspend(handle)
    assert suspended.generated == (5, 6)
    assert [event.finish_reason for event in handle] == [None, "suspended"]
    with pytest.raises(ValueError, match="request-0 has ended"):
        engine.suspend(handle)
    engine.update_weights({}, 3)
    assert [(e.token_id, e.version) for e in engine.resume(suspended)] == [(7, 3)]


def test_close_ends_what_still_runs(tokenizer) -> None:  # type: ignore[no-untyped-def]
    engine = ScriptedEngine(tokenizer, [Script([5], holds=True)])
    handle = engine.submit(Request((1,)))
    engine.close()
    assert [event.finish_reason for event in handle] == [None, "abort"]


@pytest.mark.parametrize("spans", [(1,), (2, 1, 5), (1000,)])
@pytest.mark.parametrize("fields", [{}, {"stop": "TOP i"}, {"logprobs": True}])
def test_no_answer_depends_on_the_spans(api, engine, script, spans, fields) -> None:  # type: ignore[no-untyped-def]
    def choice(one: Script):  # type: ignore[no-untyped-def]
        engine.scripts = [one]
        body = api.chat(**fields).json()
        return body["choices"], body["usage"]

    assert choice(Script(script(ANSWER), spans=spans)) == choice(Script(script(ANSWER)))


def test_cached_tokens_are_those_of_the_script(api, engine, script) -> None:  # type: ignore[no-untyped-def]
    report = {"mla_match": 12, "state_hit": 8}
    engine.scripts = [Script(script(ANSWER), num_cached=8, cache_report=report)]
    body = api.chat().json()
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 8}
    assert body["k3_cache"] == report
