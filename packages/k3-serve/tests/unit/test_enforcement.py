"""Answers that are held to a grammar: tools by choice, name and schema, and JSON responses."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from k3_serve.api.enforce import constraint_of
from k3_serve.api.schemas import ChatRequest
from k3_serve.api.service import Service

USER = {"role": "user", "content": "hi"}
START = "why<|close|>think<|sep|><|open|>response<|sep|>"
END = "<|close|>message<|sep|><|end_of_msg|>"
CLOSED = "<|close|>response<|sep|>"
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
}


def tool(name, schema=CITY, **fields):  # type: ignore[no-untyped-def]
    return {"type": "function", "function": {"name": name, "parameters": schema, **fields}}


def named(name):  # type: ignore[no-untyped-def]
    return {"type": "function", "function": {"name": name}}


def argument(key, kind, value):  # type: ignore[no-untyped-def]
    return f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'


def calls(*named_arguments):  # type: ignore[no-untyped-def]
    inside = "".join(
        f'<|open|>call tool="{name}" index="{index}"<|sep|>{arguments}<|close|>call<|sep|>'
        for index, (name, arguments) in enumerate(named_arguments, 1)
    )
    return f"{CLOSED}<|open|>tools<|sep|>{inside}<|close|>tools<|sep|>{END}"


def answer(text):  # type: ignore[no-untyped-def]
    return f"{START}{text}{CLOSED}{END}"


PARIS = argument("city", "string", "Paris")
FREE = argument("else", "null", "null")


@pytest.fixture(scope="module")
def service(tokenizer):  # type: ignore[no-untyped-def]
    return Service(None, tokenizer, "scripted")  # type: ignore[arg-type]


@pytest.fixture
def allows(service, script):  # type: ignore[no-untyped-def]
    """Whether the constraint of a request lets a whole turn pass; None without a constraint."""

    def check(text: str, **fields: object) -> bool | None:
        body = ChatRequest(model="scripted", **{"messages": [USER], **fields})
        constraint = constraint_of(body, "think", None, service)
        return None if constraint is None else constraint.accepts(script(text))

    return check


ONE, OTHER = START + calls(("f", PARIS)), START + calls(("g", PARIS))
BOTH = START + calls(("f", PARIS), ("g", PARIS))
TEXT, WRONG = answer("no"), START + calls(("f", FREE))


@pytest.mark.parametrize(
    ("fields", "allowed"),
    [
        ({}, None),
        ({"parallel_tool_calls": True}, None),
        ({"tool_choice": "none"}, {TEXT}),
        ({"tool_choice": "required"}, {ONE, OTHER, BOTH}),
        ({"tool_choice": "required", "parallel_tool_calls": False}, {ONE, OTHER}),
        ({"tool_choice": "auto", "parallel_tool_calls": False}, {TEXT, ONE, OTHER}),
        ({"tool_choice": named("g")}, {OTHER}),
        ({"tools": [tool("f", strict=True), tool("g")]}, {TEXT, ONE, OTHER, BOTH}),
        ({"tools": [tool("f", strict=False)], "tool_choice": "required"}, {ONE, WRONG}),
        ({"tools": [], "tool_choice": "none"}, None),
    ],
)
def test_the_choice_decides_which_turns_are_allowed(allows, fields, allowed) -> None:  # type: ignore[no-untyped-def]
    fields = {"tools": [tool("f"), tool("g")], **fields}
    found = {turn: allows(turn, **fields) for turn in (TEXT, ONE, OTHER, BOTH, WRONG)}
    if allowed is None:
        assert set(found.values()) == {None}
    else:
        assert {turn for turn, is_allowed in found.items() if is_allowed} == allowed


@pytest.mark.parametrize(
    ("arguments", "is_allowed"),
    [
        (PARIS, True),
        (PARIS + argument("days", "number", "3"), True),
        (PARIS + argument("days", "number", "10"), False),
        (PARIS + argument("days", "string", "3"), False),
        (argument("days", "number", "3"), False),
        (PARIS + FREE, False),
        (PARIS + PARIS, False),
        (argument("city", "number", "3"), False),
    ],
)
def test_arguments_follow_their_schema(allows, arguments, is_allowed) -> None:  # type: ignore[no-untyped-def]
    turn = START + calls(("f", arguments))
    assert allows(turn, tools=[tool("f", strict=True)]) is is_allowed
    assert allows(turn, tools=[tool("f")], tool_choice="required") is is_allowed


def test_tools_of_system_messages_are_known_too(allows) -> None:  # type: ignore[no-untyped-def]
    fields = {"messages": [USER, {"role": "system", "tools": [tool("g")]}]}
    assert allows(OTHER, tool_choice="required", **fields)
    assert allows(OTHER, tool_choice=named("g"), **fields)
    assert not allows(ONE, tool_choice="required", **fields)


def schema_format(schema, **fields):  # type: ignore[no-untyped-def]
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **fields}}


@pytest.mark.parametrize(
    ("wanted", "allowed"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {'{"city": 1}', "{}", '{\n  "city": "x"\n}'}),
        (schema_format(CITY), {'{\n  "city": "x"\n}'}),
        (schema_format(CITY, strict=True), {'{\n  "city": "x"\n}'}),
        (
            schema_format(CITY, strict=False),
            {'{"city": 1}', "{}", '{\n  "city": "x"\n}', "[3]"},
        ),
    ],
)
def test_a_response_format_decides_which_texts_are_allowed(allows, wanted, allowed) -> None:  # type: ignore[no-untyped-def]
    texts = ['{"city": 1}', "{}", '{\n  "city": "x"\n}', "[3]", "yes", "```json\n{}\n```", ""]
    found = {text: allows(answer(text), response_format=wanted) for text in texts}
    if allowed is None:
        assert set(found.values()) == {None}
    else:
        assert {text for text, is_allowed in found.items() if is_allowed} == allowed


def test_json_and_tools_are_either_or(allows) -> None:  # type: ignore[no-untyped-def]
    fields = {"response_format": {"type": "json_object"}, "tools": [tool("f")]}
    assert allows(answer("{}"), **fields)
    assert allows(ONE, **fields)
    assert not allows(answer(""), **fields)
    assert not allows(answer("{}"), tool_choice="required", **fields)


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"type": "string", "pattern": "(?=a)b"}, "cannot be enforced"),
        ({"type": "string", "pattern": "a(^b)"}, "anchor"),
        ({"type": "string", "format": "colour"}, "format"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"$ref": "#/$defs/absent"}, "leads nowhere"),
        ({"$ref": "https://example.com/schema"}, "does not begin with #"),
        ({"$ref": "#/properties/x"}, "circles"),
        ({"anyOf": [{"$ref": "#/properties/x"}]}, "refers to itself"),
        ({"type": "text"}, "not one of"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "no value fits"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "cannot be enforced"),
        ({"enum": []}, "no value fits"),
        ({"enum": 3}, "not a list"),
        (3, "not a schema"),
    ],
)
def test_row_17_one_bad_grammar_fails_one_request(api, engine, script, schema, word) -> None:  # type: ignore[no-untyped-def]
    engine.scripts = [script(ONE)]
    bad = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
    fields = {"tool_choice": "required"}

    def ask(parameters: object) -> object:
        return api.chat(tools=[tool("f", parameters, strict=True)], **fields)

    with ThreadPoolExecutor(3) as pool:
        first, refused, last = pool.map(ask, [CITY, bad, CITY])
    assert (first.status_code, last.status_code) == (200, 200)
    assert refused.status_code == 400, refused.text
    error = refused.json()["error"]
    assert word in error["message"]
    assert len(error["message"]) < 500
    assert len(engine.requests) == 2


def test_a_tool_that_is_not_strict_is_enforced_as_far_as_can_be(allows) -> None:  # type: ignore[no-untyped-def]
    odd = {**CITY, "minProperties": 1}
    odd["properties"] = {**CITY["properties"], "city": {"type": "string", "format": "town"}}
    assert allows(ONE, tools=[tool("f", odd)], tool_choice="required")
    assert not allows(WRONG, tools=[tool("f", odd)], tool_choice="required")
    hopeless = {"type": "object", "properties": {"x": {"$ref": "elsewhere"}}}
    assert allows(WRONG, tools=[tool("f", hopeless)], tool_choice="required")
    assert not allows(TEXT, tools=[tool("f", hopeless)], tool_choice="required")


def test_row_4_an_opener_inside_a_close_tag(api, engine, script) -> None:  # type: ignore[no-untyped-def]
    engine.scripts = [script(f"why<|close|>think<|open|>response<|sep|>yes{CLOSED}{END}")]
    message = api.chat().json()["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("yes", "why")


def test_row_14_text_of_markers_and_the_number_of_a_call(
    allows, service, tokenizer, script
) -> None:  # type: ignore[no-untyped-def]
    # Markers as text are other ids than the control tokens: they stay inside of the argument.
    start, end = script(START + CLOSED + '<|open|>tools<|sep|><|open|>call tool="f" index="1"'), END
    text = tokenizer.encode("<|close|>argument<|sep|><|end_of_msg|>")
    body = ChatRequest(
        model="x", messages=[USER], tools=[tool("f", strict=True)], tool_choice="required"
    )
    constraint = constraint_of(body, "think", None, service)
    opener = script('<|sep|><|open|>argument key="city" type="string"<|sep|>')
    closers = script(f"<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>{end}")
    assert constraint.accepts([*start, *opener, *text, *closers])
    fields = {"tools": [tool("f"), tool("g")], "tool_choice": "required"}
    assert allows(BOTH, **fields)
    assert not allows(BOTH.replace('index="2"', 'index="1"'), **fields)


def test_row_16_the_grammar_accepts_what_the_renderer_writes(tokenizer, service) -> None:  # type: ignore[no-untyped-def]
    values = {
        "s": 'a "b" & <|close|>',
        "n": 2.5,
        "b": True,
        "z": None,
        "o": {"k": [1, "x"]},
        "a": [],
    }
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": values}}
    turn = {"role": "assistant", "reasoning_content": "hm", "content": "so", "tool_calls": [call]}
    before = tokenizer.apply_chat_template([USER])
    ids = tokenizer.apply_chat_template([USER, turn], add_generation_prompt=False)
    schema = {"type": "object", "properties": {key: {} for key in values}}
    body = ChatRequest(
        model="x", messages=[USER], tools=[tool("f", schema, strict=True)], tool_choice="required"
    )
    constraint = constraint_of(body, "think", None, service)
    assert ids[: len(before)] == before
    assert constraint.accepts(ids[len(before) :])


@pytest.mark.parametrize("tail", ["<", "<|close|>", "<|close|>resp", "<|open|>"])
def test_row_19_half_a_marker_at_the_end_is_flushed(api, engine, script, read_events, tail) -> None:  # type: ignore[no-untyped-def]
    engine.scripts = [script(f"{START}yes{tail}")]
    choice = api.chat().json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] == f"yes{tail}"
    parts = [c["delta"] for e in read_events(api.chat(stream=True))[:-1] for c in e["choices"]]
    assert "".join(part.get("content", "") for part in parts) == f"yes{tail}"


def test_choices_do_not_share_the_state_of_their_grammar(api, engine, script) -> None:  # type: ignore[no-untyped-def]
    engine.scripts = [script(ONE), script(OTHER), script(BOTH)]
    fields = {"tools": [tool("f"), tool("g")], "tool_choice": "required"}
    choices = api.chat(n=3, **fields).json()["choices"]
    names = [[c["function"]["name"] for c in x["message"]["tool_calls"]] for x in choices]
    assert names == [["f"], ["g"], ["f", "g"]]
    arguments = choices[0]["message"]["tool_calls"][0]["function"]["arguments"]
    assert json.loads(arguments) == {"city": "Paris"}
