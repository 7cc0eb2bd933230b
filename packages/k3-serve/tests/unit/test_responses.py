"""/v1/responses: items of input become a conversation, an answer becomes items and events."""

import json

import pytest

from k3_serve.testing import Script

ANSWER = (
    "two and two<|close|>think<|sep|><|open|>response<|sep|>4 \U0001f642<|close|>response<|sep|>"
    "<|close|>message<|sep|><|end_of_msg|>"
)
CALLS = (
    "hm<|close|>think<|sep|><|open|>response<|sep|>wait<|close|>response<|sep|><|open|>tools<|sep|>"
    '<|open|>call tool="add" index="1"<|sep|><|open|>argument key="a" type="number"<|sep|>2'
    "<|close|>argument<|sep|><|close|>call<|sep|>"
    '<|open|>call tool="now" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
    "<|close|>message<|sep|><|end_of_msg|>"
)
TOOLS = [{"type": "function", "name": name, "parameters": {}} for name in ("add", "now")]


@pytest.fixture
def respond(api):  # type: ignore[no-untyped-def]
    return lambda **fields: api.request(
        "POST", "/v1/responses", json={"model": "scripted", "input": "hi", **fields}
    )


@pytest.fixture
def events(respond):  # type: ignore[no-untyped-def]
    """The events of a stream, each with the name that its data has too."""

    def read(**fields: object) -> list[dict]:
        response = respond(stream=True, **fields)
        assert response.headers["content-type"].startswith("text/event-stream")
        found = []
        for block in response.text.split("\n\n")[:-1]:
            name, _, data = block.partition("\n")
            event = json.loads(data.removeprefix("data: "))
            assert name == f"event: {event['type']}"
            found.append(event)
        assert [event["sequence_number"] for event in found] == list(range(len(found)))
        return found

    return read


def without_ids(value):  # type: ignore[no-untyped-def]
    if isinstance(value, list):
        return [without_ids(item) for item in value]
    if not isinstance(value, dict):
        return value
    skipped = ("id", "call_id", "created_at")
    return {key: without_ids(item) for key, item in value.items() if key not in skipped}


@pytest.mark.parametrize("text", [ANSWER, CALLS, ANSWER[:60], "cut<|close|>thi", ""])
def test_the_whole_response_is_the_last_of_the_stream(
    respond, events, engine, script, text
) -> None:  # type: ignore[no-untyped-def]
    engine.scripts = [script(text)]
    whole, streamed = respond(tools=TOOLS).json(), events(tools=TOOLS)
    assert streamed[0]["type"] == "response.created"
    assert streamed[0]["response"]["status"] == "in_progress"
    assert streamed[0]["response"]["output"] == []
    assert streamed[-1]["type"] == f"response.{whole['status']}"
    assert without_ids(streamed[-1]["response"]) == without_ids(whole)
    is_cut = text not in (ANSWER, CALLS)
    assert whole["status"] == ("incomplete" if is_cut else "completed")
    assert (whole["incomplete_details"] is not None) == is_cut


def test_items_of_an_answer(respond, engine, script) -> None:  # type: ignore[no-untyped-def]
    engine.scripts = [script(ANSWER)]
    reasoning, message = respond().json()["output"]
    assert (reasoning["type"], reasoning["summary"]) == ("reasoning", [])
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "two and two"}]
    assert (message["type"], message["role"], message["status"]) == (
        "message",
        "assistant",
        "completed",
    )
    (part,) = message["content"]
    assert part == {"type": "output_text", "text": "4 \U0001f642", "annotations": []}


def test_events_of_every_item_add_up_to_it(events, engine, script) -> None:  # type: ignore[no-untyped-def]
    engine.scripts = [script(CALLS)]
    found = events(tools=TOOLS)
    output = found[-1]["response"]["output"]
    kinds = [item["type"] for item in output]
    assert kinds == ["reasoning", "message", "function_call", "function_call"]
    for index, item in enumerate(output):
        mine = [event for event in found if event.get("output_index") == index]
        assert mine[0]["type"] == "response.output_item.added"
        assert mine[0]["item"]["status"] == "in_progress"
        assert mine[-1] == {**mine[-1], "type": "response.output_item.done", "item": item}
        assert {event.get("item_id", item["id"]) for event in mine} == {item["id"]}
        joined = "".join(event.get("delta", "") for event in mine)
        whole = item["arguments"] if "arguments" in item else item["content"][0]["text"]
        assert joined == whole
    assert [json.loads(call["arguments"]) for call in output[2:]] == [{"a": 2}, {}]
    assert len({call["call_id"] for call in output[2:]}) == 2


def test_usage_adds_up_in_both_modes(respond, events, engine, script) -> None:  # type: ignore[no-untyped-def]
    engine.scripts = [script(ANSWER)]
    for usage in (respond().json()["usage"], events()[-1]["response"]["usage"]):
        assert usage["input_tokens"] == len(engine.requests[-1].token_ids)
        assert usage["output_tokens"] == len(engine.scripts[0])
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        assert usage["output_tokens_details"] == {"reasoning_tokens": len("two and two")}


def test_a_conversation_of_items_is_that_of_a_chat(respond, api, engine, script) -> None:  # type: ignore[no-untyped-def]
    engine.scripts = [script("<|end_of_msg|>")]
    text = [{"type": "input_text", "text": "what"}]
    items = [
        {"role": "developer", "content": "be brief"},
        {"type": "message", "role": "user", "content": text},
        {
            "type": "reasoning",
            "content": [{"type": "reasoning_text", "text": "add"}],
            "summary": [],
        },
        {"role": "assistant", "content": [{"type": "output_text", "text": "wait"}]},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 2}'},
        {"type": "function_call", "call_id": "c2", "name": "now", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c2", "output": "noon"},
        {"type": "function_call_output", "call_id": "c1", "output": "3"},
        {"role": "assistant", "content": "3"},
        {"role": "assistant", "content": "at noon"},
    ]
    calls = [("c1", "add", '{"a": 2}'), ("c2", "now", "{}")]
    turn = {
        "role": "assistant",
        "reasoning_content": "add",
        "content": "wait",
        "tool_calls": [
            {"id": i, "type": "function", "function": {"name": n, "arguments": a}}
            for i, n, a in calls
        ],
    }
    messages = [
        {"role": "system", "content": "hello"},
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "what"},
        turn,
        {"role": "tool", "tool_call_id": "c2", "content": "noon"},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        {"role": "assistant", "content": "3"},
        {"role": "assistant", "content": "at noon"},
    ]
    options = {"reasoning": {"effort": "low"}, "max_output_tokens": 9, "tools": TOOLS}
    response = respond(input=items, instructions="hello", **options)
    assert response.status_code == 200, response.text
    chat_tools = [
        {"type": "function", "function": {"name": t["name"], "parameters": {}}} for t in TOOLS
    ]
    api.chat(messages=messages, tools=chat_tools, reasoning_effort="low", max_tokens=9)
    mine, chats = engine.requests
    assert engine.tokenizer.decode(mine.token_ids) == engine.tokenizer.decode(chats.token_ids)
    assert mine.sampling.max_tokens == 9


@pytest.mark.parametrize(
    ("fields", "text", "status"),
    [
        ({"text": {"format": {"type": "json_object"}}}, ANSWER, 500),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"const": 4}}}},
            ANSWER.replace(" \U0001f642", ""),
            200,
        ),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "now"}}, CALLS, 500),
        ({"tools": TOOLS, "tool_choice": "required"}, CALLS, 200),
    ],
)
def test_formats_and_choices_are_enforced(respond, engine, script, fields, text, status) -> None:  # type: ignore[no-untyped-def]
    engine.scripts = [script(text)]
    assert respond(**fields).status_code == status


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": 5}]}, "input"),
        ({"input": [{"type": "reasoning", "content": 5}]}, "input[0].content"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].tool_call_id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"model": "gpt"}, "model"),
        ({"input": "x" * 5000}, "input"),
    ],
)
def test_a_bad_field_is_named(respond, engine, fields, param) -> None:  # type: ignore[no-untyped-def]
    response = respond(**fields)
    assert response.status_code == (404 if param == "model" else 400), response.text
    assert response.json()["error"]["param"] == param
    assert not engine.requests


def test_a_failure_is_a_status_or_the_last_event(respond, events, engine, script) -> None:  # type: ignore[no-untyped-def]
    problem = "the logits are not finite"
    engine.scripts = [Script(error=problem)]
    assert respond().status_code == 500
    assert respond(stream=True).status_code == 500
    engine.scripts = [Script(script("some thoughts"), error=problem)]
    last = events()[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert "not finite" in last["response"]["error"]["message"]
