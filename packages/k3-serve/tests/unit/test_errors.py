"""Every refusal: status, shape, and the field at fault."""

import json

import pytest

from k3_serve.testing import Script

TOOL = {"type": "function", "function": {"name": "f"}}
USER = {"role": "user", "content": "hi"}


def tool(**fields):  # type: ignore[no-untyped-def]
    return {"type": "function", "function": {"name": "f", **fields}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x", "tools": [TOOL]}]}, "messages[0].tools"),
        ({"messages": [{"role": "system", "content": "x", "tools": [TOOL]}]}, "messages"),
        ({"messages": [{"role": "system", "tools": TOOL}]}, "messages[0].tools"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        (
            {"messages": [{"role": "tool", "content": "x", "tool_call_id": ""}]},
            "messages[0].tool_call_id",
        ),
        ({"tools": "f"}, "tools"),
        ({"tools": ["f"]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [{**TOOL, "type": "magic"}]}, "tools[0]"),
        ({"tools": [tool(name="a b")]}, "tools[0].function.name"),
        ({"tools": [tool(name="")]}, "tools[0].function.name"),
        ({"tools": [TOOL, TOOL]}, "messages"),
        ({"tools": [TOOL], "messages": [{"role": "system", "tools": [TOOL]}, USER]}, "messages"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": "any", "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "function"}, "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {**TOOL, "type": "allowed_tools"}, "tools": [TOOL]}, "tool_choice"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [TOOL]},
            "tool_choice.function.name",
        ),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format.json_schema.name",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            "response_format.json_schema.schema",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {}, "strict": "yes"},
                }
            },
            "response_format.json_schema.strict",
        ),
        ({"reasoning_effort": "medium"}, "reasoning_effort"),
        ({"thinking": {"effort": "huge"}}, "thinking.effort"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": float("nan")}, "top_p"),
        ({"logit_bias": {"1": float("nan")}}, "logit_bias"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        ({"thinking": {"keep": "last"}}, "thinking.keep"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"seed": 2**63}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"999999999": 1}}, "logit_bias"),
        ({"messages": [{**USER, "partial": True}]}, "messages[0].partial"),
        ({"messages": [{"role": "assistant", "partial": True}, USER]}, "messages[0].partial"),
        (
            {"messages": [USER, {"role": "assistant", "partial": True, "tool_calls": [TOOL]}]},
            "messages[1]",
        ),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
    ],
)
def test_a_bad_chat_field_is_named(api, engine, fields, param) -> None:  # type: ignore[no-untyped-def]
    response = api.chat(**fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"].startswith(param)
    assert not engine.aborted
    assert not engine.requests


@pytest.mark.parametrize("fields", [{}, {"tool_choice": "none"}, {"tool_choice": "auto"}])
def test_tool_choice_without_tools_is_fine(api, engine, script, fields) -> None:  # type: ignore[no-untyped-def]
    engine.scripts = [script("<|end_of_msg|>")]
    assert api.chat(**fields).status_code == 200


def test_a_tool_may_be_declared_in_the_last_message(api, engine, script) -> None:  # type: ignore[no-untyped-def]
    engine.scripts = [script("<|end_of_msg|>")]
    assert api.chat(messages=[USER, {"role": "system", "tools": [TOOL]}]).status_code == 200


def test_an_assistant_turn_without_reasoning_is_accepted(api, engine, script) -> None:  # type: ignore[no-untyped-def]
    engine.scripts = [script("<|end_of_msg|>")]
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    history = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "x", "content": "1"},
    ]
    assert api.chat(messages=history, tools=[TOOL]).status_code == 200


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"{", 400),
        (b"[]", 400),
        (b"null", 400),
        (b'{"model": "\xff"}', 400),
        (b'{"messages": ' + b"[" * 50_000, 400),
        (b'{"model": "scripted"}', 400),
        (b" " * 200_001, 413),
    ],
)
def test_bodies_that_are_no_request(api, content, status) -> None:  # type: ignore[no-untyped-def]
    headers = {"Content-Type": "application/json"}
    response = api.request("POST", "/v1/chat/completions", content=content, headers=headers)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("chat/completions", {"messages": [USER], "stop": ["x"] * 17}, "stop: List should have at"),
        ("chat/completions", {"messages": [USER], "stop": 5}, "stop: Input should be a valid str"),
        ("completions", {"prompt": [3, -1]}, "prompt[1]: Input should be greater than or equal"),
        ("completions", {"prompt": []}, "prompt: List should have at least 1 item"),
    ],
)
def test_a_field_of_several_types_says_what_is_wrong(api, path, fields, message) -> None:  # type: ignore[no-untyped-def]
    response = api.request("POST", f"/v1/{path}", json={"model": "scripted", **fields})
    assert response.json()["error"]["message"].startswith(message)


def test_broken_json_says_where_and_blames_no_field(api) -> None:  # type: ignore[no-untyped-def]
    headers = {"Content-Type": "application/json"}
    response = api.request("POST", "/v1/completions", content=b'{"a": 1,', headers=headers)
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (None, "json_invalid")
    assert error["message"].endswith("at character 8")


def test_an_undeclared_long_body_is_cut_off(api) -> None:  # type: ignore[no-untyped-def]
    async def endless():  # type: ignore[no-untyped-def]
        for _ in range(300):
            yield b" " * 1000

    headers = {"Content-Type": "application/json"}
    response = api.request("POST", "/v1/completions", content=endless(), headers=headers)
    assert response.status_code == 413
    assert "200000 bytes" in response.json()["error"]["message"]


def test_deeply_nested_but_valid_json_is_refused_or_served(api, engine, script) -> None:  # type: ignore[no-untyped-def]
    engine.scripts = [script("<|end_of_msg|>")]
    for depth in (100, 300, 900, 5000):
        schema = json.loads('{"a":' * 60 + "1" + "}" * 60)
        text = json.dumps({"model": "scripted", "messages": [USER], "tools": ["@"]})
        nested = "[" * depth + "]" * depth
        tools = json.dumps(tool(parameters=schema))[:-2] + f', "x": {nested}}}}}'
        content = text.replace('"@"', tools).encode()
        headers = {"Content-Type": "application/json"}
        response = api.request("POST", "/v1/chat/completions", content=content, headers=headers)
        assert response.status_code in (200, 400), depth


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/chat/completions", 405),
        ("GET", "/v1/models/other", 404),
    ],
)
def test_unknown_routes_have_the_same_shape(api, method, path, status) -> None:  # type: ignore[no-untyped-def]
    response = api.request(method, path)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_an_unknown_model_is_404(api) -> None:  # type: ignore[no-untyped-def]
    for response in (api.chat(model="gpt"), api.complete(model="gpt", prompt="x")):
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "model_not_found"
        assert "'scripted'" in response.json()["error"]["message"]


def test_a_failure_before_the_first_token_is_a_status(api, engine) -> None:  # type: ignore[no-untyped-def]
    engine.scripts = [Script(error="the logits are not finite")]
    for response in (api.chat(), api.chat(stream=True), api.complete(prompt="x", stream=True)):
        assert response.status_code == 500
        assert "not finite" in response.json()["error"]["message"]


def test_a_failure_in_mid_stream_is_an_event_that_ends_it(  # type: ignore[no-untyped-def]
    api, engine, script, read_events
) -> None:
    tokens = script("some thoughts")
    engine.scripts = [Script(tokens, spans=(1,), error="the logits are not finite")]
    events = read_events(api.complete(prompt="x", stream=True, max_tokens=99))
    assert events[0]["choices"][0]["text"] == "s"
    assert events[-1]["error"]["type"] == "server_error"
    assert "[DONE]" not in events


def test_what_comes_with_a_failure_is_sent_before_it(api, engine, read_events) -> None:  # type: ignore[no-untyped-def]
    engine.scripts = [Script(list(b"some"), error="the logits are not finite")]
    first, last = read_events(api.complete(prompt="x", stream=True, max_tokens=99))
    assert first["choices"][0]["text"] == "some"
    assert "not finite" in last["error"]["message"]


def test_an_unexpected_exception_leaks_nothing(api, engine, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    def broken(request):  # type: ignore[no-untyped-def]
        raise RuntimeError("secret prompt text")

    monkeypatch.setattr(engine, "submit", broken)
    response = api.chat()
    assert response.status_code == 500
    assert "secret" not in response.text
    assert response.json()["error"]["type"] == "server_error"


def test_models_and_health(api) -> None:  # type: ignore[no-untyped-def]
    listed = api.request("GET", "/v1/models").json()
    assert listed["object"] == "list"
    assert listed["data"] == [api.request("GET", "/v1/models/scripted").json()]
    assert listed["data"][0]["max_model_len"] == 4096
    assert api.request("GET", "/health").json() == {"status": "ok"}


def test_half_a_surrogate_pair_is_no_server_error(api, engine, script) -> None:  # type: ignore[no-untyped-def]
    engine.scripts = [script("<|end_of_msg|>")]
    lone = "a\ud800b"
    assert api.chat(messages=[{"role": "user", "content": lone}]).status_code == 200
    assert api.chat(model=lone).status_code in (400, 404)
    tools = [tool(name=lone)]
    assert api.chat(tools=tools).status_code == 400
    assert api.chat(messages=[{"role": lone, "content": "x"}]).status_code == 400
