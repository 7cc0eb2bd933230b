"""Properties of XTML: caller text is never structure, render and parse are inverse, and parsing
depends neither on the tokenisation nor on where it is suspended (report 8.1, serving 2 and 5A)."""

import json
from collections.abc import Iterator
from itertools import chain
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from k3_core.tokenizer import K3Tokenizer
from k3_core.xtml import (
    MessageEnd,
    XtmlParser,
    chat_segments,
    fold,
    generation_prefix,
    parse_message,
    render_training,
)

# Merges that cross what a word-wise tokenisation would keep apart, besides all single bytes.
WORDS = ["th", "ink", "think", "<|", "|>", " =", '="', "op", "open"]
MERGES = [*map(str.encode, WORDS), b"\xf0\x9f", b"\xe6\x97"]
RANKS = {token: i for i, token in enumerate([*(bytes([b]) for b in range(256)), *MERGES])}
TOKENIZER = K3Tokenizer(RANKS, num_base_tokens=len(RANKS))

SPELLINGS = [
    *TOKENIZER.special_ids,
    "<|close|>argument<|sep|>",
    '<|open|>message role="system"<|sep|>',
    "<|kimi_image_placeholder|>",
    '"',
    "&quot;",
    "&amp;",
    "\\",
    "\n",
    "日本🚀",
]
texts = st.lists(st.sampled_from(SPELLINGS) | st.text(max_size=4), max_size=5).map("".join)
names = texts.filter(bool)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts
finite = scalars.filter(lambda value: value not in (float("inf"), float("-inf")))
values = st.recursive(
    finite, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3)
)
objects = st.dictionaries(texts, values, max_size=4)


@st.composite
def turns(draw: st.DrawFn, words: st.SearchStrategy[str] = texts) -> dict[str, Any]:
    """An assistant message with arguments as objects, as JSON strings and as broken JSON."""
    broken = words.map(lambda text: "{" + text)
    arguments = objects | objects.map(json.dumps) | broken.filter(_is_broken)
    calls = draw(st.lists(st.tuples(names, arguments), max_size=3))
    entries = [{"function": {"name": n, "arguments": a}, "type": "function"} for n, a in calls]
    reasoning = draw(words)
    return {
        "role": "assistant",
        "content": draw(words),
        "reasoning_content": reasoning,
        "tool_calls": entries,
    }


def _is_broken(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return True
    return False


def answer_ids(turn: dict[str, Any], thinking: bool) -> list[int]:
    """The ids that a model would have generated for the turn."""
    options = {"thinking": thinking, "thinking_effort": None, "add_generation_prompt": False}
    prefix = TOKENIZER.encode_segments(generation_prefix(thinking))
    ids = TOKENIZER.apply_chat_template([turn], **options)
    assert ids[: len(prefix)] == prefix
    return ids[len(prefix) :]


@given(turns(), st.booleans())
def test_parse_reverses_render(turn, thinking):
    message = parse_message(TOKENIZER, answer_ids(turn, thinking), thinking)
    reasoning = turn["reasoning_content"] if thinking else ""
    assert message.reasoning == (reasoning if reasoning.strip() else "")
    assert message.content == turn["content"]
    assert message.is_complete
    assert len(message.tool_calls) == len(turn["tool_calls"])
    num_broken = 0
    for call, entry in zip(message.tool_calls, turn["tool_calls"], strict=True):
        given_arguments = entry["function"]["arguments"]
        assert (call.name, call.is_complete) == (entry["function"]["name"], True)
        if isinstance(given_arguments, str) and _is_broken(given_arguments):
            assert call.arguments == given_arguments
            num_broken += 1
            continue
        if isinstance(given_arguments, str):
            given_arguments = json.loads(given_arguments)
        assert list(json.loads(call.arguments).items()) == list(given_arguments.items())
    assert len(message.errors) == num_broken


@given(turns(), st.booleans(), st.data())
def test_parse_does_not_depend_on_the_tokenisation(turn, thinking, data):
    ids = answer_ids(turn, thinking)
    other: list[int] = []
    for token_id in ids:
        token = TOKENIZER.token_bytes(token_id)
        is_split = token_id < TOKENIZER.num_base_tokens and data.draw(st.booleans())
        other += list(token) if is_split else [token_id]
    assert parse_message(TOKENIZER, other, thinking) == parse_message(TOKENIZER, ids, thinking)


def noise() -> st.SearchStrategy[list[int]]:
    """Arbitrary ids, in which pieces of structure are much more frequent than by chance."""
    tags = ("think", "response", "tools", "json", "message", "other")
    markers = [f"<|{side}|>{tag}<|sep|>" for side in ("open", "close") for tag in tags]
    markers += [
        '<|open|>call tool="f" index="1"<|sep|>',
        "<|close|>call<|sep|>",
        '<|open|>argument key="k" type="string"<|sep|>',
        '<|open|>argument key="m" type="object"<|sep|>{',
        "<|close|>argument<|sep|>",
        "<|open|>",
        "<|close|>",
        "<|sep|>",
    ]
    pieces = st.sampled_from(markers).map(lambda text: TOKENIZER.encode(text, allow_special=True))
    single = st.integers(0, TOKENIZER.vocab_size + 1).map(lambda i: [i])
    bodies = texts.map(TOKENIZER.encode)
    return st.lists(pieces | single | bodies, max_size=12).map(
        lambda parts: list(chain.from_iterable(parts))
    )


def resumed_events(ids: list[int], thinking: bool) -> Iterator[Any]:
    """The events when the parser is written to JSON and read back after every token."""
    parser = XtmlParser(TOKENIZER, thinking)
    for token_id in ids:
        yield from parser.feed(token_id)
        state = json.loads(json.dumps(parser.state_dict()))
        parser = XtmlParser.from_state(TOKENIZER, state)
    yield from parser.finish()


@given(noise(), st.booleans())
def test_any_output_parses_and_resumes_anywhere(ids, thinking):
    parser = XtmlParser(TOKENIZER, thinking)
    events = [event for token_id in ids for event in parser.feed(token_id)] + parser.finish()
    assert list(resumed_events(ids, thinking)) == events
    assert [i for i, e in enumerate(events) if isinstance(e, MessageEnd)] == [len(events) - 1]
    message = fold(events)
    for call in message.tool_calls:
        if call.is_complete and "the arguments are given as raw text" not in message.errors:
            assert isinstance(json.loads(call.arguments), dict)


def conversation(text: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A conversation and its tools with the caller's text in every field that takes text."""
    schema = {"type": "object", "properties": {"p" + text: {"description": text, "enum": [text]}}}
    function = {"name": "f" + text, "description": text, "parameters": schema}
    tool = {"type": "function", "function": function}
    new_function = {"name": "g" + text, "parameters": schema}
    call = {"id": "i" + text, "type": "function"}
    arguments = {"k" + text: text, "l" + text: [text, {text: text}]}
    calls = [
        call | {"function": {"name": "n" + text, "arguments": arguments}},
        {"function": {"name": "n" + text, "arguments": "{" + text}},
    ]
    messages = [
        {"role": "system", "content": "s" + text, "name": "a" + text},
        {"role": "system", "tools": [{"type": "function", "function": new_function}]},
        {"role": "user", "content": "u" + text, "name": "b" + text},
        {"role": "user", "content": [{"type": "text", "text": "v" + text}]},
        {
            "role": "assistant",
            "reasoning_content": "r" + text,
            "content": "c" + text,
            "tool_calls": calls,
        },
        {"role": "tool", "tool_call_id": "i" + text, "content": "t" + text},
        {"role": "tool", "name": "n" + text, "content": "t" + text},
    ]
    return messages, [tool]


@given(texts.filter(lambda text: _is_broken("{" + text)))
def test_caller_text_never_becomes_a_control_token(text):
    schema = {"type": "object", "description": text}
    response_format = {"type": "json_schema", "json_schema": {"name": text, "schema": schema}}

    def special_ids(caller_text: str) -> list[int]:
        messages, tools = conversation(caller_text)
        options = {"tools": tools, "response_format": response_format, "tool_choice": "required"}
        ids = TOKENIZER.apply_chat_template(messages, **options)
        segments = chat_segments(messages, **options)
        assert "".join(segment.text for segment in segments) == TOKENIZER.decode(ids)
        return [i for i in ids if i >= TOKENIZER.num_base_tokens]

    assert special_ids(text) == special_ids("")


@given(st.lists(turns(), min_size=1, max_size=3), texts, st.booleans())
def test_training_targets_parse_to_the_messages(assistant_turns, text, thinking):
    messages = [m for turn in assistant_turns for m in ({"role": "user", "content": text}, turn)]
    ids, mask = render_training(TOKENIZER, messages, thinking=thinking)
    targets = [i for i, target in zip(ids, mask, strict=True) if target]
    ends = [n for n, i in enumerate(targets, start=1) if i == TOKENIZER.end_of_msg_id]
    assert len(ends) == len(assistant_turns)
    for turn, start, end in zip(assistant_turns, [0, *ends], ends, strict=False):
        expected = parse_message(TOKENIZER, answer_ids(turn, thinking), thinking)
        for call in expected.tool_calls:
            if _is_broken(call.arguments):  # broken arguments are never learnt
                call.arguments = "{}"
        expected.errors = []
        assert parse_message(TOKENIZER, targets[start:end], thinking) == expected
