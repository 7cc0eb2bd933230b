"""An answer is the fold of its stream, whatever tokens the model writes (serving 9f, P6 and P8)."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from k3_core.engine.wire import add_delta

PIECES = [
    *("<|close|>", "<|open|>", "<|sep|>", "<|end_of_msg|>", "[EOS]", "<|media_pad|>"),
    *("think", "response", "tools", "message", "STOP", "ST", "OP", "é", "日本", "\n", '"', "{}"),
    "<|close|>think<|sep|><|open|>response<|sep|>",
    "<|close|>response<|sep|><|open|>tools<|sep|>",
    '<|open|>call tool="f" index="1"<|sep|>',
    '<|open|>argument key="k" type="string"<|sep|>',
    '<|open|>argument key="n" type="number"<|sep|>2.5',
    "<|close|>argument<|sep|>",
    "<|close|>call<|sep|>",
]
SETTINGS = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def outputs(draw):  # type: ignore[no-untyped-def]
    pieces = draw(st.lists(st.sampled_from(PIECES), max_size=12))
    cut = draw(st.integers(0, 3))
    return "".join(pieces), cut


@pytest.mark.parametrize("is_thinking", [True, False])
@SETTINGS
@given(output=outputs(), n=st.integers(1, 2), has_stop=st.booleans())
def test_a_chat_is_the_fold_of_its_stream(  # type: ignore[no-untyped-def]
    api, engine, script, read_events, is_thinking, output, n, has_stop
) -> None:
    text, cut = output
    ids = script(text)
    engine.scripts = [ids[: len(ids) - cut]]  # the end may cut a character or a marker
    fields = {
        "n": n,
        "logprobs": True,
        "reasoning_effort": "low" if is_thinking else "none",
        **({"stop": ["STOP"]} if has_stop else {}),
    }
    whole = api.chat(**fields).json()
    options = {"include_usage": True}
    *chunks, last, done = read_events(api.chat(stream=True, stream_options=options, **fields))
    assert (done, last["usage"]) == ("[DONE]", whole["usage"])
    usage = whole["usage"]
    assert usage["prompt_tokens"] == len(engine.requests[-1].token_ids)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    for choice in whole["choices"]:
        parts = [c for e in chunks for c in e["choices"] if c["index"] == choice["index"]]
        message: dict = {"content": None}
        for part in parts:
            add_delta(message, part["delta"])
        expected = choice["message"]
        for key in ("reasoning_content", "reasoning", "role"):
            assert message.get(key) == expected.get(key)
        assert (message["content"] or "") == (expected["content"] or "")
        calls = [call["function"] for call in message.get("tool_calls", ())]
        assert calls == [call["function"] for call in expected.get("tool_calls", ())]
        reasons = [part["finish_reason"] for part in parts]
        assert reasons == [None] * (len(parts) - 1) + [choice["finish_reason"]]
        entries = [e for p in parts if p.get("logprobs") for e in p["logprobs"]["content"]]
        assert entries == (choice["logprobs"] or {"content": []})["content"]
        assert len(entries) * n == usage["completion_tokens"]
        if has_stop:
            assert "STOP" not in (message["content"] or "")


@SETTINGS
@given(output=outputs(), stop=st.sampled_from([None, ["STOP"], ["OP", "é"]]))
def test_a_text_is_the_fold_of_its_stream(api, engine, script, read_events, output, stop) -> None:  # type: ignore[no-untyped-def]
    text, cut = output
    ids = script(text)
    engine.scripts = [ids[: len(ids) - cut]]
    fields = {"prompt": "x", "stop": stop, "logprobs": 1, "max_tokens": 200}
    (choice,) = api.complete(**fields).json()["choices"]
    parts = [e["choices"][0] for e in read_events(api.complete(stream=True, **fields))[:-1]]
    assert "".join(part["text"] for part in parts) == choice["text"]
    for name, values in choice["logprobs"].items():
        assert [value for part in parts for value in part["logprobs"][name]] == values
    # A stop token ends the text; before it, and before a stop string, everything is there.
    shown = engine.tokenizer.decode(i for i in ids[: len(ids) - cut])
    for end in (*(stop or ()), "<|end_of_msg|>", "[EOS]"):
        shown = shown.partition(end)[0]
    assert choice["text"] == shown
