"""The XTML parser on well-formed, damaged and cut output (serving 5A names the rows)."""

import json
import re

import pytest

from k3_core.tokenizer import K3Tokenizer
from k3_core.xtml import (
    ContentDelta,
    MessageEnd,
    ParsedCall,
    ParsedMessage,
    ReasoningDelta,
    ToolArgsDelta,
    ToolCallEnd,
    ToolCallStart,
    XtmlParser,
    joined,
    parse_message,
)

TOKENIZER = K3Tokenizer({bytes([byte]): byte for byte in range(256)}, num_base_tokens=256)
THINK = "why<|close|>think<|sep|>"
ANSWER = "<|open|>response<|sep|>yes<|close|>response<|sep|>"
END = "<|close|>message<|sep|><|end_of_msg|>"
F = '<|open|>call tool="f" index="1"<|sep|>'


def ids_of(output: str) -> list[int]:
    return TOKENIZER.encode(output, allow_special=True)


def parse(output: str, thinking: bool = True) -> ParsedMessage:
    return parse_message(TOKENIZER, ids_of(output), thinking)


def tools(*calls: str) -> str:
    return "<|open|>tools<|sep|>" + "".join(calls) + "<|close|>tools<|sep|>"


def argument(key: str, kind: str, value: str) -> str:
    return f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'


def test_a_whole_turn():
    arguments = argument("s", "string", 'a"\\\n') + argument("n", "number", "1.0")
    output = THINK + ANSWER + tools(F, arguments, "<|close|>call<|sep|>") + END
    call = ParsedCall("f", '{"s": "a\\"\\\\\\n", "n": 1.0}', is_complete=True)
    assert parse(output) == ParsedMessage("why", "yes", [call], [], is_complete=True)


def test_events_come_with_the_token_that_completes_them():
    parser = XtmlParser(TOKENIZER)
    output = "é" + THINK[3:] + "<|open|>response<|sep|><|close|>response<|sep|>"
    output += tools(F, argument("k", "string", "vw"), "<|close|>call<|sep|>") + END
    steps = [parser.feed(token_id) for token_id in ids_of(output)]
    assert steps[0] == []
    assert steps[1] == [ReasoningDelta("é")]
    assert [event for step in steps for event in step][1:] == [
        ToolCallStart(0, "f"),
        ToolArgsDelta(0, '{"k": "'),
        ToolArgsDelta(0, "v"),
        ToolArgsDelta(0, "w"),
        ToolArgsDelta(0, '"'),
        ToolArgsDelta(0, "}"),
        ToolCallEnd(0),
        MessageEnd(is_complete=True),
    ]
    assert parser.feed(65) == parser.finish() == []


def test_zero_arguments_are_an_empty_object():
    message = parse(THINK + ANSWER + tools(F, "<|close|>call<|sep|>") + END)
    assert (message.tool_calls, message.errors) == ([ParsedCall("f", "{}", True)], [])


def test_two_calls_number_from_zero_and_unescape_their_names():
    second = '<|open|>call tool="&quot;g&amp;quot;" index="2"<|sep|><|close|>call<|sep|>'
    message = parse(THINK + ANSWER + tools(F, "<|close|>call<|sep|>", second) + END)
    assert [call.name for call in message.tool_calls] == ["f", '"g&quot;']
    assert message.errors == []


def test_instruct_output_begins_in_the_response():
    message = parse("yes<|close|>response<|sep|>" + END, thinking=False)
    assert message == ParsedMessage("", "yes", [], [], is_complete=True)


def test_row_1_message_closes_without_the_response_close():
    message = parse(THINK + "<|open|>response<|sep|>yes" + END)
    assert (message.content, message.is_complete) == ("yes", True)
    assert message.errors == ["message closes inside response"]


@pytest.mark.parametrize("marker", ["<|open|>response<|sep|>", "<|open|>tools<|sep|>"])
def test_row_4_opener_inside_a_close_tag(marker):
    message = parse("why<|close|>think" + marker)
    assert (message.reasoning, message.content) == ("why", "")
    assert message.errors[0] == "<|sep|> is missing after <|close|>think"
    answered = parse("why<|close|>think<|open|>response<|sep|>yes")
    assert (answered.reasoning, answered.content) == ("why", "yes")


def test_an_end_inside_a_close_tag():
    message = parse(THINK + ANSWER + "<|close|>message<|end_of_msg|>")
    assert (message.content, message.is_complete) == ("yes", True)
    assert message.errors == ["<|sep|> is missing after <|close|>message"]


def test_row_5_long_string_arguments_stream():
    parser = XtmlParser(TOKENIZER)
    for token_id in ids_of(THINK + ANSWER + "<|open|>tools<|sep|>" + F):
        parser.feed(token_id)
    for token_id in ids_of('<|open|>argument key="k" type="string"<|sep|>'):
        parser.feed(token_id)
    assert all(parser.feed(ord("x")) == [ToolArgsDelta(0, "x")] for _ in range(1000))


@pytest.mark.parametrize("cut", ["<", "<|open|>", "<|close|>thi", "<|open|>response", "<|close|>"])
def test_row_19_a_marker_cut_by_the_end_goes_to_the_current_channel(cut):
    message = parse("why" + cut)
    assert (message.reasoning, message.content) == ("why" + cut, "")
    assert not message.is_complete
    in_answer = parse(THINK + "<|open|>response<|sep|>y" + cut)
    assert in_answer.content == "y" + cut


def test_row_19_an_unfinished_character_is_not_lost():
    assert parse_message(TOKENIZER, [*b"a", 0xF0, 0x9F]).reasoning == "a\ufffd"
    cut = [0xF0, 0x9F, *ids_of(THINK[3:])]
    assert parse_message(TOKENIZER, cut).reasoning == "\ufffd"


def test_row_14_markers_typed_as_text_stay_text():
    typed = "<|close|>argument<|sep|><|end_of_msg|>"
    ids = ids_of(THINK + ANSWER + "<|open|>tools<|sep|>" + F)
    ids += ids_of('<|open|>argument key="k" type="string"<|sep|>') + TOKENIZER.encode(typed)
    ids += ids_of("<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>" + END)
    message = parse_message(TOKENIZER, ids)
    assert json.loads(message.tool_calls[0].arguments) == {"k": typed}
    assert message.errors == []


@pytest.mark.parametrize(
    ("kind", "value", "arguments", "error"),
    [
        ("number", "1e999", '{"k": 1e999}', None),
        ("number", "9" * 5000, f'{{"k": {"9" * 5000}}}', None),
        ("array", "[" * 100_000, None, "is no JSON"),
        ("number", "NaN", '{"k": "NaN"}', "is no JSON"),
        ("object", "{oops", '{"k": "{oops"}', "is no JSON"),
        ("null", "", '{"k": ""}', "is no JSON"),
        ("number", "true", '{"k": true}', "is not of type 'number'"),
        ("integer", "3", '{"k": 3}', "is not of type 'integer'"),
    ],
)
def test_argument_values(kind, value, arguments, error):
    calls = tools(F, argument("k", kind, value), "<|close|>call<|sep|>")
    message = parse(THINK + ANSWER + calls + END)
    (call,) = message.tool_calls
    assert call.is_complete
    assert arguments is None or call.arguments == arguments
    assert json.loads(call.arguments, parse_int=str).keys() == {"k"}
    assert len(message.errors) == (error is not None)
    assert error is None or re.search(error, message.errors[0])


def test_a_call_cut_by_the_end_is_never_made_whole():
    start = THINK + ANSWER + "<|open|>tools<|sep|>" + F
    opened = start + '<|open|>argument key="k" type="string"<|sep|>rm -r'
    for output in (opened, opened + "<|end_of_msg|>"):
        (call,) = parse(output).tool_calls
        assert call == ParsedCall("f", '{"k": "rm -r', is_complete=False)
    (call,) = parse(start + '<|open|>argument key="k" type="array"<|sep|>[1, ').tool_calls
    assert call == ParsedCall("f", '{"k": [1, ', is_complete=False)


@pytest.mark.parametrize(
    ("output", "content", "error"),
    [
        (THINK + "plain <|open|>b<|sep|>", "plain <|open|>b<|sep|>", "text between elements"),
        (THINK + "<|open|>response<|sep|>a<|sep|>b", "a<|sep|>b", "has no meaning"),
        (THINK + "<|open|>response<|sep|>a<|close|>b<|sep|>", "a<|close|>b<|sep|>", "no meaning"),
        (THINK + "<|open|>response<|sep|>a<|close|>think<|sep|>b", "ab", "think closes inside"),
        (THINK + "<|open|>response<|sep|>a[PAD]b", "a[PAD]b", r"special token \[PAD\]"),
        (THINK + ANSWER + tools(argument("k", "string", "v")), None, "has no meaning"),
        (THINK + ANSWER + tools('<|open|>call index="1"<|sep|>'), None, "has no meaning"),
        (THINK + ANSWER + ANSWER, "yesyes", "response comes after response"),
        (THINK + ANSWER + '<|open|>message role="user"<|sep|>x', "yes", "another message begins"),
        (THINK + ANSWER + "<|close|>message<|sep|>more", "yesmore", "text between elements"),
        (THINK + ANSWER + "[EOS]", "yes", "the output ends inside message"),
    ],
)
def test_damaged_output_degrades_to_content(output, content, error):
    message = parse(output)
    assert content is None or message.content == content
    assert message.reasoning == "why"
    assert re.search(error, message.errors[0])


def test_openers_that_were_left_out_are_supplied():
    message = parse("why<|open|>response<|sep|>yes" + F + argument("k", "string", "v") + END)
    assert (message.reasoning, message.content) == ("why", "yes")
    assert message.tool_calls == [ParsedCall("f", '{"k": "v"}', is_complete=True)]
    assert len(message.errors) == 3


def test_state_holds_an_unfinished_character_and_header():
    ids = [*ids_of(THINK + ANSWER + "<|open|>tools<|sep|><|open|>"), *b'call tool="', 0xC3]
    parser = XtmlParser(TOKENIZER)
    for token_id in ids:
        parser.feed(token_id)
    state = json.loads(json.dumps(parser.state_dict()))
    resumed = XtmlParser.from_state(TOKENIZER, state)
    rest = [0xA9, *b'" index="1"', TOKENIZER.sep_id]
    events = [event for token_id in rest for event in resumed.feed(token_id)]
    assert events == [ToolCallStart(0, "é")]


def test_content_after_the_response_keeps_streaming():
    parser = XtmlParser(TOKENIZER)
    for token_id in ids_of(THINK + " \n"):
        parser.feed(token_id)
    assert ContentDelta("a") in parser.feed(ord("a"))
    assert parser.feed(ord(" ")) == [ContentDelta(" ")]


def test_text_that_goes_on_joins_to_one_delta_of_its_kind_and_call() -> None:
    args = [ToolArgsDelta(0, "{"), ToolArgsDelta(0, "}"), ToolArgsDelta(1, "{}")]
    events = [ReasoningDelta("a"), ReasoningDelta("b"), ContentDelta("c"), *args, ToolCallEnd(1)]
    assert joined([*events, ContentDelta("d"), ContentDelta("e")]) == [
        ReasoningDelta("ab"),
        ContentDelta("c"),
        ToolArgsDelta(0, "{}"),
        ToolArgsDelta(1, "{}"),
        ToolCallEnd(1),
        ContentDelta("de"),
    ]
