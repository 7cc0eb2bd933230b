"""The public rules for servers of this model, as our own black-box tests (serving 4b).

Parameters of the hosted profile, the shape of requests, features, and prompt tokens. The families
of tool schemas are in property/test_grammar.py; here each goes through the API, both ways.
"""

import json

import pytest

from k3_core.errors import K3Error
from k3_serve.api.app import create_app
from k3_serve.settings import Settings

USER = {"role": "user", "content": "hi"}
ANSWER = (
    "hm<|close|>think<|sep|><|open|>response<|sep|>4<|close|>response<|sep|>"
    "<|close|>message<|sep|><|end_of_msg|>"
)
CALL = (
    "<|close|>think<|sep|><|open|>response<|sep|><|close|>response<|sep|><|open|>tools<|sep|>"
    '<|open|>call tool="f" index="1"<|sep|>{}<|close|>call<|sep|><|close|>tools<|sep|>'
    "<|close|>message<|sep|><|end_of_msg|>"
)


def tool(name="f", **fields):  # type: ignore[no-untyped-def]
    return {"type": "function", "function": {"name": name, "parameters": {}, **fields}}


def dynamic(*tools, **fields):  # type: ignore[no-untyped-def]
    return {"role": "system", "tools": list(tools), **fields}


def schema(**fields):  # type: ignore[no-untyped-def]
    return {"response_format": {"type": "json_schema", "json_schema": fields}}


@pytest.fixture
def hosted(engine, tokenizer, api_of, script):  # type: ignore[no-untyped-def]
    engine.scripts = [script(ANSWER)]
    return api_of(create_app(engine, tokenizer, "scripted", Settings(profile="kimi")))


FIXED = [
    ("temperature", 1.0, (0.0, 0.6, 1.01, 2)),
    ("top_p", 0.95, (0.9, 1.0, 0.951)),
    ("presence_penalty", 0, (0.1, -1)),
    ("frequency_penalty", 0, (0.5, 2)),
    ("n", 1, (2, 0)),
]


@pytest.mark.parametrize(("name", "value", "others"), FIXED)
def test_the_hosted_profile_has_fixed_parameters(hosted, api, name, value, others) -> None:  # type: ignore[no-untyped-def]
    assert hosted.chat(**{name: value}).status_code == 200
    for other in others:
        response = hosted.chat(**{name: other})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == name


def test_an_unknown_profile_is_named() -> None:
    with pytest.raises(K3Error, match="profile 'moon' is not one of open, kimi"):
        Settings(profile="moon")


def test_the_open_profile_lets_them_be_chosen(api, engine, script) -> None:  # type: ignore[no-untyped-def]
    engine.scripts = [script(ANSWER)]
    assert api.chat(temperature=0.5, top_p=0.9, n=2, stop=["x"] * 6).status_code == 200


@pytest.mark.parametrize(
    ("stop", "status"),
    [
        (["abcde"] * 5, 200),
        (["x"] * 6, 400),
        ("x" * 32, 200),
        ("x" * 33, 400),
        (["é" * 17], 400),
    ],
)
def test_the_hosted_profile_bounds_stop_strings(hosted, stop, status) -> None:  # type: ignore[no-untyped-def]
    response = hosted.chat(stop=stop)
    assert response.status_code == status
    assert status == 200 or response.json()["error"]["param"].startswith("stop")


def test_the_hosted_profile_has_usage_in_the_last_choice(hosted, read_events) -> None:  # type: ignore[no-untyped-def]
    whole = hosted.chat().json()
    *_, last, done = read_events(hosted.chat(stream=True))
    assert done == "[DONE]"
    assert last["choices"][0]["finish_reason"] == "stop"
    assert last["choices"][0]["usage"] == whole["usage"]
    assert "usage" not in whole["choices"][0]


REFUSED = {
    "required without tools": {"tool_choice": "required"},
    "required with no tools": {"tool_choice": "required", "tools": []},
    "another tool_choice": {"tool_choice": "any", "tools": [tool()]},
    "another response_format": {"response_format": {"type": "xml"}},
    "response_format without a type": {"response_format": {}},
    "json_schema without a name": schema(schema={}),
    "json_schema without a schema": schema(name="x"),
    "json_schema that is no object": schema(name="x", schema=[]),
    "json_schema with an odd strict": schema(name="x", schema={}, strict=1),
    "tools of a user": {"messages": [{**USER, "tools": [tool()]}]},
    "tools of an assistant": {
        "messages": [{"role": "assistant", "content": "", "tools": [tool()]}]
    },
    "content and tools": {"messages": [dynamic(tool(), content="x")]},
    "a tool without a type": {"tools": [{"function": {"name": "f"}}]},
    "a tool without a function": {"tools": [{"type": "function"}]},
    "a tool without a name": {"tools": [{"type": "function", "function": {"parameters": {}}}]},
    "a tool with a bad name": {"tools": [tool("a b")]},
    "a tool with a long name": {"tools": [tool("a" * 65)]},
    "a tool of unknown type": {"tools": [{**tool(), "type": "plugin"}]},
    "parameters that are no object": {"tools": [tool(parameters=[])]},
    "a description that is no text": {"tools": [tool(description=3)]},
    "a strict that is no boolean": {"tools": [tool(strict="yes")]},
    "tools that are no list": {"tools": tool()},
    "tools that are no objects": {"tools": ["f"]},
    "dynamic tools that are no list": {"messages": [{"role": "system", "tools": tool()}]},
    "a name twice": {"tools": [tool(), tool()]},
    "a name twice in a message": {"messages": [USER, dynamic(tool(), tool())]},
    "a name in two messages": {"messages": [dynamic(tool()), USER, dynamic(tool())]},
    "a name global and dynamic": {"tools": [tool()], "messages": [USER, dynamic(tool())]},
    "a result without an id": {"messages": [USER, {"role": "tool", "content": "x"}]},
    "an unknown effort": {"reasoning_effort": "medium"},
    "another keep": {"thinking": {"type": "enabled", "keep": "last"}},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(hosted, engine, name) -> None:  # type: ignore[no-untyped-def]
    for is_streamed in (False, True):
        response = hosted.chat(**REFUSED[name], stream=is_streamed)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["type"] == "invalid_request_error"
    assert not engine.requests


SERVED = {
    "none without tools": {"tool_choice": "none"},
    "auto without tools": {"tool_choice": "auto"},
    "auto with no tools": {"tool_choice": "auto", "tools": []},
    "dynamic tools first": {"messages": [dynamic(tool()), USER]},
    "dynamic tools last": {"messages": [USER, dynamic(tool())]},
    "dynamic tools in two messages": {"messages": [dynamic(tool()), USER, dynamic(tool("g"))]},
    "dynamic and empty content": {"messages": [dynamic(tool(), content=""), USER]},
    "global and dynamic": {"tools": [tool()], "messages": [dynamic(tool("g")), USER]},
    "tools that are not strict": {"tools": [tool(strict=False)]},
    "tools without parameters": {"tools": [{"type": "function", "function": {"name": "f"}}]},
    "a long conversation": {"messages": [USER, {"role": "assistant", "content": "x"}] * 9 + [USER]},
    "nulls": {"temperature": None, "stop": None, "tools": None, "stream": None, "n": None},
    "thinking off": {"thinking": {"type": "disabled"}},
    "keep all": {"thinking": {"type": "enabled", "keep": "all"}},
}


@pytest.mark.parametrize("name", SERVED)
def test_what_is_served(hosted, engine, script, read_events, name) -> None:  # type: ignore[no-untyped-def]
    if name == "thinking off":
        engine.scripts = [script(ANSWER.partition("<|open|>response<|sep|>")[2])]
    whole = hosted.chat(**SERVED[name])
    assert whole.status_code == 200, whole.text
    choice = whole.json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("4", "stop")
    events = read_events(hosted.chat(**{**SERVED[name], "stream": True}))
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in events[:-1]) == "4"


SCHEMAS = {
    "anyOf": ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "null", "null", None),
    "$ref": ({"$ref": "#/$defs/d"}, "string", "ab", "ab"),
    "range": ({"type": "integer", "minimum": 0, "maximum": 9}, "number", "7", 7),
    "format": ({"type": "string", "format": "date"}, "string", "2026-02-28", "2026-02-28"),
    "floats": ({"enum": [0.1, 2.5]}, "number", "2.5", 2.5),
    "free object": ({"type": "object"}, "object", '{"a": [1, "x"]}', {"a": [1, "x"]}),
    "several types": ({"type": ["string", "array"]}, "array", "[1, 2]", [1, 2]),
    "boolean": ({"type": "boolean"}, "boolean", "true", True),
    "text": ({"type": "string"}, "string", 'say "hi"\n<|close|', 'say "hi"\n<|close|'),
}


@pytest.mark.parametrize("family", SCHEMAS)
@pytest.mark.parametrize("key", ["x", "a b", 'say "x"', "$x", "日本"])
def test_arguments_of_a_schema_reach_the_client(  # type: ignore[no-untyped-def]
    hosted, engine, script, read_events, family, key
) -> None:
    part, kind, text, value = SCHEMAS[family]
    name = key.replace('"', "&quot;")
    argument = f'<|open|>argument key="{name}" type="{kind}"<|sep|>{text}<|close|>argument<|sep|>'
    engine.scripts = [script(CALL.format(argument))]
    parameters = {
        "type": "object",
        "properties": {key: part},
        "required": [key],
        "additionalProperties": False,
        "$defs": {"d": {"type": "string", "enum": ["ab", "cd"]}},
    }
    fields = {"tools": [tool(parameters=parameters, strict=True)], "tool_choice": "required"}
    whole = hosted.chat(**fields)
    assert whole.status_code == 200, whole.text
    choice = whole.json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {key: value}
    events = read_events(hosted.chat(**fields, stream=True))
    parts = [c for e in events[:-1] for c in e["choices"][0]["delta"].get("tool_calls", ())]
    assert "".join(c["function"]["arguments"] for c in parts) == call["function"]["arguments"]
    assert events[-2]["choices"][0]["finish_reason"] == "tool_calls"


def test_prompt_tokens_are_exact(hosted, engine, script) -> None:  # type: ignore[no-untyped-def]
    def tokens(**fields: object) -> int:
        used = hosted.chat(**fields).json()["usage"]["prompt_tokens"]
        assert used == len(engine.requests[-1].token_ids)
        return used

    plain = tokens()
    turn = {"role": "assistant", "content": "x"}
    thought = tokens(messages=[USER, {**turn, "reasoning_content": "abc"}, USER])
    assert thought - tokens(messages=[USER, turn, USER]) == 3
    engine.scripts = [script(ANSWER.replace("4", "{}"))]
    assert tokens(response_format={"type": "json_object"}) > plain


@pytest.mark.parametrize(("is_streamed", "effort"), [(True, "low"), (False, "max")])
def test_calls_and_results_round_trip(hosted, engine, script, is_streamed, effort) -> None:  # type: ignore[no-untyped-def]
    engine.scripts = [script(CALL.format("")), script(ANSWER)]
    fields = {"tools": [tool()], "thinking": {"effort": effort}, "reasoning_effort": "invalid"}
    message = hosted.chat(**fields).json()["choices"][0]["message"]
    assert message["tool_calls"][0]["function"]["arguments"] == "{}"
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "3"}
    response = hosted.chat(messages=[USER, message, result], stream=is_streamed, **fields)
    assert response.status_code == 200, response.text
    prompt = engine.tokenizer.decode(engine.requests[-1].token_ids)
    assert 'role="tool" tool="f" index="1"<|sep|>3' in prompt
    assert f"thinking_effort={effort}" in prompt


def test_an_image_in_a_tool_message_is_seen(hosted, engine) -> None:  # type: ignore[no-untyped-def]
    import base64
    import io

    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", (28, 28)).save(buffer, "PNG")
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    content = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": url}}]
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": content},
    ]
    assert hosted.chat(messages=messages, tools=[tool()]).status_code == 200
    (request,) = engine.requests
    assert request.images.grid_thws.tolist() == [[1, 2, 2]]
    assert list(request.token_ids).count(engine.tokenizer.media_pad_id) == 1
