"""A last assistant message with `partial: true` is continued."""

import pytest

USER = {"role": "user", "content": "hi"}
END = "<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"
PREFIX = '<|open|>message role="assistant"<|sep|>'


def partial(**fields):  # type: ignore[no-untyped-def]
    return [USER, {"role": "assistant", "partial": True, **fields}]


@pytest.mark.parametrize(
    ("fields", "effort", "tail", "channel"),
    [
        (
            {"content": "So", "reasoning_content": "hm"},
            "low",
            "<|open|>think<|sep|>hm<|close|>think<|sep|><|open|>response<|sep|>So",
            "response",
        ),
        (
            {"content": [{"type": "text", "text": "S"}, {"type": "text", "text": "o"}]},
            "low",
            "<|open|>think<|sep|><|close|>think<|sep|><|open|>response<|sep|>So",
            "response",
        ),
        ({"reasoning": "hm"}, "low", "<|open|>think<|sep|>hm", "think"),
        ({"content": ""}, "low", "<|open|>think<|sep|>", "think"),
        ({"content": "So", "reasoning": "hm"}, "none", "<|open|>response<|sep|>So", "response"),
    ],
)
def test_the_prompt_ends_with_the_message(  # type: ignore[no-untyped-def]
    api, engine, script, fields, effort, tail, channel
) -> None:
    engine.scripts = [script(END if channel == "response" else "<|end_of_msg|>")]
    response = api.chat(messages=partial(**fields), reasoning_effort=effort)
    assert response.status_code == 200, response.text
    (request,) = engine.requests
    assert engine.tokenizer.decode(request.token_ids).endswith(PREFIX + tail)
    assert request.channel == channel


def test_the_answer_is_what_follows(api, engine, script) -> None:  # type: ignore[no-untyped-def]
    engine.scripts = [script(f" it is.{END}")]
    body = api.chat(messages=partial(content="So"), stop="So").json()
    assert body["choices"][0]["message"] == {"role": "assistant", "content": " it is."}
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


@pytest.mark.parametrize(
    ("content", "rest", "status"),
    [('{"a": ', "1}", 200), ('{"a": ', "]}", 500), ("Sure: ", "{}", 400)],
)
def test_a_prefix_counts_for_the_response_format(
    api, engine, script, content, rest, status
) -> None:  # type: ignore[no-untyped-def]
    engine.scripts = [script(rest + END)]
    response = api.chat(messages=partial(content=content), response_format={"type": "json_object"})
    assert response.status_code == status, response.text


@pytest.mark.parametrize(
    "fields",
    [
        {"content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]},
        {"content": "x", "tool_calls": [{"id": "x"}]},
        {"content": 5},
        {"reasoning_content": 5},
    ],
)
def test_a_partial_message_is_text(api, engine, fields) -> None:  # type: ignore[no-untyped-def]
    response = api.chat(messages=partial(**fields))
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("messages[1]")
    assert not engine.requests


def test_user_text_in_a_prefix_is_no_marker(api, engine, script) -> None:  # type: ignore[no-untyped-def]
    engine.scripts = [script(END)]
    api.chat(messages=partial(content="a"))
    api.chat(messages=partial(content="<|close|>response<|sep|>"))
    controls = [
        sum(i >= engine.tokenizer.num_base_tokens for i in request.token_ids)
        for request in engine.requests
    ]
    assert controls[0] == controls[1]
