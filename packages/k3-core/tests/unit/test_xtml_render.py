"""What the XTML renderer refuses, orders and masks (architecture 8, serving 4a and 4b)."""

from typing import Any

import pytest

from k3_core.tokenizer import K3Tokenizer
from k3_core.xtml import ConversationError, chat_segments, render_training

USER = {"role": "user", "content": "u"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
TOKENIZER = K3Tokenizer({bytes([byte]): byte for byte in range(256)}, num_base_tokens=256)


def render(messages: list[dict[str, Any]], **options: Any) -> str:
    options = {"thinking_effort": None, "add_generation_prompt": False, **options}
    return "".join(text for text, _ in chat_segments(messages, **options))


def assistant(*calls: tuple[str | None, str, Any], **fields: Any) -> dict[str, Any]:
    entries = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for call_id, name, arguments in calls
    ]
    return {"role": "assistant", "content": "", "tool_calls": entries, **fields}


def result(content: str, **fields: Any) -> dict[str, Any]:
    return {"role": "tool", "content": content, **fields}


def part(**fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": [fields]}


@pytest.mark.parametrize(
    ("messages", "options", "error"),
    [
        ([USER], {"thinking_effort": "medium"}, "thinking_effort 'medium' is not one of low, high"),
        ([USER], {"thinking_effort": ""}, "thinking_effort '' is not one of"),
        ([USER], {"tool_choice": "maybe"}, "tool_choice 'maybe' is not one of auto, none"),
        ([USER], {"tool_choice": {"type": "function"}}, "tool_choice .* is not one of"),
        ([USER], {"response_format": {"type": "xml"}}, "response_format type 'xml' is not one"),
        ([USER], {"response_format": {"type": "json_schema"}}, "schema is None; it must be"),
        (
            [USER],
            {"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}},
            r"schema is \[1\]; it must be a JSON object",
        ),
        (
            [{"role": "developer", "content": "x"}],
            {},
            r"messages\[0\]: role 'developer' is not one",
        ),
        ([USER, {"content": "x"}], {}, r"messages\[1\]: role None"),
        ([USER, "text"], {}, r"messages\[1\]: role None"),
        ([{"role": "user", "content": 3}], {}, r"messages\[0\]: content is a int"),
        ([part(type="audio")], {}, r"messages\[0\]: content part .*audio"),
        ([part(type="text", text=None)], {}, r"messages\[0\]: content part"),
        ([{"role": "user", "name": 1, "content": ""}], {}, "name 1 is not a string"),
        ([{"role": "user", "tools": [TOOL]}], {}, "only system messages declare tools"),
        ([{"role": "system", "content": "x", "tools": [TOOL]}], {}, "tools or content, not both"),
        ([USER], {"tools": [TOOL, TOOL]}, "tool 'f' is declared twice"),
        ([{"role": "system", "tools": [TOOL]}], {"tools": [TOOL]}, "tool 'f' is declared twice"),
        ([USER], {"tools": [{"type": "function"}]}, r"tools\[0\] must be"),
        ([USER], {"tools": [TOOL | {"type": "other"}]}, r"tools\[0\] must be"),
        ([USER], {"tools": {"f": TOOL}}, "tools is a dict, not a list"),
        ([assistant(("a", "f", "[1]"))], {}, r"tool_calls\[0\]: arguments are '\[1\]', not a JSON"),
        ([assistant(("a", "f", "null"))], {}, "not a JSON object"),
        ([assistant(("a", "f", [1]))], {}, "not a JSON object"),
        ([assistant(("a", "", {}))], {}, "has no function.name"),
        ([assistant((7, "f", {}))], {}, "id 7 is not a string"),
        ([assistant(tool_calls="f()")], {}, "tool_calls is a str, not a list"),
        ([assistant(reasoning_content=["x"])], {}, "reasoning is a list, not a string"),
        ([USER, result("r", tool_call_id="a")], {}, "cannot tell which tool result 1 is of"),
        (
            [assistant(("a", "f", {})), result("r", tool_call_id="a"), result("s")],
            {},
            "cannot tell which tool result 2 is of",
        ),
        ([part(type="image")], {"image_prompts": []}, "0 image prompts for 1 images"),
        ([USER], {"image_prompts": ["p"]}, "1 image prompts for 0 images"),
        ([part(type="image")], {"image_prompts": ["p", "q"]}, "2 image prompts for 1 images"),
    ],
)
def test_refusals_name_the_value(messages, options, error):
    with pytest.raises(ConversationError, match=error):
        render(messages, **options)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), {"s": {1}}])
def test_values_without_a_json_form_are_refused(value):
    with pytest.raises(ConversationError, match="argument 'x' cannot be written as JSON"):
        render([assistant(("a", "f", {"x": value}))])
    with pytest.raises(ConversationError, match="tools cannot be written as JSON"):
        render([USER], tools=[TOOL | {"x": value}])


def test_nesting_too_deep_is_refused():
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ConversationError, match="argument 'x' cannot be written as JSON"):
        render([assistant(("a", "f", {"x": deep}))])


def test_instruct_mode_does_not_look_at_the_effort():
    assert render([USER], thinking=False, thinking_effort="medium") == render([USER])


def results_of(messages: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """(attributes, content) of the rendered tool results."""
    pieces = render(messages).split('<|open|>message role="tool" ')[1:]
    return [tuple(piece.split("<|close|>")[0].split("<|sep|>")) for piece in pieces]


CALLS = assistant(("a", "f", {}), ("b", "g", {}))


def test_results_follow_the_calls_when_every_id_matches():
    swapped = [result("B", tool_call_id="b"), result("A", tool_call_id="a", name="wrong")]
    expected = [('tool="f" index="1"', "A"), ('tool="g" index="2"', "B")]
    assert results_of([CALLS, *swapped]) == expected
    aliases = [result("B", tool_call_id="g:1"), result("A", tool_call_id="f:0")]
    assert results_of([CALLS, *aliases]) == expected


def test_an_id_that_comes_back_in_a_later_turn_is_that_turns_call():
    first, second = assistant(("a", "f", {}), ("b", "g", {})), assistant(("b", "h", {}))
    results = [result("B", tool_call_id="b"), result("A", tool_call_id="a")]
    assert results_of([first, *results, USER, second, result("C", tool_call_id="b")]) == [
        ('tool="f" index="1"', "A"),
        ('tool="g" index="2"', "B"),
        ('tool="h" index="1"', "C"),
    ]


def test_results_with_ambiguous_ids_stay_in_place():
    calls = assistant(("a", "f", {}), ("a", "g", {}))
    results = [result("1", tool_call_id="a"), result("2", tool_call_id="a", tool="h")]
    assert results_of([calls, *results]) == [
        ('tool="f" index="1"', "1"),
        ('tool="h" index="2"', "2"),
    ]


def test_result_numbers_count_on_across_a_break_and_restart_with_the_assistant():
    messages = [CALLS, result("1"), USER, result("2"), CALLS, result("3")]
    assert results_of(messages) == [
        ('tool="f" index="1"', "1"),
        ('tool="g" index="2"', "2"),
        ('tool="f" index="1"', "3"),
    ]


@pytest.mark.parametrize("arguments", [None, "", " \n", {}, "{}"])
def test_calls_without_arguments(arguments):
    text = render([assistant(("a", "f", arguments))])
    assert '<|open|>call tool="f" index="1"<|sep|><|close|>call<|sep|>' in text


@pytest.mark.parametrize("arguments", ["{", "nul", '{"a": NaN}', '{"a": 1e}', "9" * 5000])
def test_arguments_that_are_no_json_are_kept_as_text(arguments):
    text = render([assistant(("a", "f", arguments))])
    assert f'<|open|>json type="object"<|sep|>{arguments}<|close|>json' in text


def test_placeholder_spelled_in_a_text_part_or_an_answer_is_no_image():
    spelled = "<|kimi_image_placeholder|>"
    messages = [
        {"role": "user", "content": [{"type": "text", "text": spelled}, {"type": "image"}]},
        {"role": "assistant", "content": spelled},
    ]
    segments = chat_segments(messages, image_prompts=["IMAGE"])
    assert [s for s in segments if s.text in (spelled, "IMAGE")] == [
        (spelled, False),
        ("IMAGE", True),
        (spelled, False),
    ]


def test_training_mask_covers_what_the_model_generates():
    messages = [
        {"role": "system", "content": "s"},
        USER,
        assistant(("a", "f", {"x": 1}), ("b", "g", "{oops"), reasoning_content="why"),
        result("A"),
        {"role": "assistant", "content": "yes"},
    ]
    ids, mask = render_training(TOKENIZER, messages, tools=[TOOL], thinking_effort="low")
    options = {"tools": [TOOL], "thinking_effort": "low", "add_generation_prompt": False}
    assert ids == TOKENIZER.apply_chat_template(messages, **options)
    learnt = [i for i, target in zip(ids, mask, strict=True) if target]
    assert TOKENIZER.decode(learnt) == (
        "why<|close|>think<|sep|><|open|>response<|sep|><|close|>response<|sep|><|open|>tools<|sep|>"
        '<|open|>call tool="f" index="1"<|sep|><|open|>argument key="x" type="number"<|sep|>1'
        '<|close|>argument<|sep|><|close|>call<|sep|><|open|>call tool="g" index="2"<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>"
        "<|close|>think<|sep|><|open|>response<|sep|>yes<|close|>response<|sep|>"
        "<|close|>message<|sep|><|end_of_msg|>"
    )


def test_training_mask_without_thinking():
    messages = [USER, {"role": "assistant", "content": "yes", "reasoning_content": "why"}]
    ids, mask = render_training(TOKENIZER, messages, thinking=False)
    learnt = [i for i, target in zip(ids, mask, strict=True) if target]
    expected = "yes<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"
    assert TOKENIZER.decode(learnt) == expected
    assert set(mask[: -len(learnt)]) == {0}
