"""What users of other servers reported, over HTTP (serving 5A and 5C name the rows)."""

import base64
import json
import logging
import socket
import struct
import zlib

import httpx
import pytest

from k3_serve.api.app import create_app
from k3_serve.api.choice import ChatChoice
from k3_serve.testing import Script

ANSWER = "why<|close|>think<|sep|><|open|>response<|sep|>{}"
CLOSED = "<|close|>response<|sep|>{}<|close|>message<|sep|><|end_of_msg|>"
CALL = '<|open|>call tool="{}" index="{}"<|sep|>{}<|close|>call<|sep|>'
STRING = '<|open|>argument key="{}" type="string"<|sep|>{}<|close|>argument<|sep|>'
USER = {"role": "user", "content": "hi"}


def tools(*names, **fields):  # type: ignore[no-untyped-def]
    return [{"type": "function", "function": {"name": name, **fields}} for name in names]


@pytest.fixture
def both(api, engine, script, read_events):  # type: ignore[no-untyped-def]
    """The message of a chat, streamed and whole; a difference between the two is a failure."""

    def run(text: str, **fields: object) -> dict:
        engine.scripts = [script(text)]
        (choice,) = api.chat(**fields).json()["choices"]
        parts = [c for e in read_events(api.chat(stream=True, **fields))[:-1] for c in e["choices"]]
        streamed: dict = {"content": "", "reasoning_content": "", "arguments": {}}
        for part in parts:
            for key in ("content", "reasoning_content"):
                streamed[key] += part["delta"].get(key, "")
            for call in part["delta"].get("tool_calls", ()):
                before = streamed["arguments"].get(call["index"], "")
                streamed["arguments"][call["index"]] = before + call["function"]["arguments"]
        message = choice["message"]
        calls = message.get("tool_calls", [])
        assert streamed == {
            "content": message["content"] or "",
            "reasoning_content": message.get("reasoning_content", ""),
            "arguments": {i: call["function"]["arguments"] for i, call in enumerate(calls)},
        }
        reasons = [part["finish_reason"] for part in parts]
        assert reasons == [None] * (len(parts) - 1) + [choice["finish_reason"]]
        assert parts[-1]["delta"] == {}
        return {**choice, "deltas": [part["delta"] for part in parts]}

    return run


def test_row_1_a_turn_that_ends_without_the_response_close(both) -> None:  # type: ignore[no-untyped-def]
    text = ANSWER.format("yes") + "<|close|>message<|sep|><|end_of_msg|>"
    choice = both(text, tools=tools("f"))
    assert (choice["message"]["content"], choice["finish_reason"]) == ("yes", "stop")


@pytest.mark.parametrize("choice", ["required", "auto"])
def test_rows_7_and_8_a_strict_tool_while_thinking(both, choice) -> None:  # type: ignore[no-untyped-def]
    call = CALL.format("f", 1, STRING.format("k", "v"))
    text = ANSWER.format("") + CLOSED.format(f"<|open|>tools<|sep|>{call}<|close|>tools<|sep|>")
    answer = both(text, tools=tools("f", strict=True, parameters={}), tool_choice=choice)
    assert answer["finish_reason"] == "tool_calls"
    assert answer["message"]["content"] is None
    assert answer["message"]["reasoning_content"] == "why"
    (call,) = answer["message"]["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": '{"k": "v"}'}


def test_row_11_a_result_may_name_its_call_by_position(api, engine, script) -> None:  # type: ignore[no-untyped-def]
    engine.scripts = [script("<|end_of_msg|>")]
    calls = [{"id": "", "type": "function", "function": {"name": n}} for n in ("f", "g")]
    results = [{"role": "tool", "tool_call_id": i, "content": i} for i in ("g:1", "f:0")]
    history = [USER, {"role": "assistant", "content": "", "tool_calls": calls}, *results]
    assert api.chat(messages=history, tools=tools("f", "g")).status_code == 200
    prompt = engine.tokenizer.decode(engine.requests[0].token_ids)
    assert 'tool="f" index="1"<|sep|>f:0' in prompt
    assert 'tool="g" index="2"<|sep|>g:1' in prompt


def test_row_13_long_arguments_after_text_and_two_calls(both) -> None:  # type: ignore[no-untyped-def]
    long = 'line "one"\n' * 900
    calls = CALL.format("f", 1, STRING.format("k\n", long)) + CALL.format("g", 2, "")
    text = ANSWER.format("let me") + CLOSED.format(f"<|open|>tools<|sep|>{calls}")
    answer = both(text, tools=tools("f", "g"))["message"]
    assert answer["content"] == "let me"
    first, second = (call["function"] for call in answer["tool_calls"])
    assert json.loads(first["arguments"]) == {"k\n": long}
    assert (second["name"], second["arguments"]) == ("g", "{}")


def test_row_20_the_parser_does_not_depend_on_skip_special_tokens(both) -> None:  # type: ignore[no-untyped-def]
    text = ANSWER.format("yes") + CLOSED.format("")
    answers = [both(text, skip_special_tokens=skip)["message"] for skip in (True, False)]
    assert answers[0] == answers[1]
    assert answers[0]["content"] == "yes"


def test_rows_52_and_53_wide_characters_and_a_stop(both, api, engine, read_events) -> None:  # type: ignore[no-untyped-def]
    before, stop = "日本語\U0001f680e\u0301の答え", "終わり"
    answer = both(ANSWER.format(f"{before}{stop}残り") + CLOSED.format(""), stop=[stop])
    assert answer["message"]["content"] == before
    assert "\ufffd" not in json.dumps(answer["deltas"], ensure_ascii=False)
    engine.scripts = [list(f"{before}{stop}残り".encode())]
    options = {"prompt": "x", "stop": stop, "max_tokens": 99, "stream": True}
    pieces = [e["choices"][0]["text"] for e in read_events(api.complete(**options))[:-1]]
    assert "".join(pieces) == before
    assert not any("\ufffd" in piece for piece in pieces)


def test_row_58_a_length_stop_ends_with_an_empty_delta(both) -> None:  # type: ignore[no-untyped-def]
    answer = both(ANSWER.format("one two"), max_tokens=len("why") + 19)
    assert answer["finish_reason"] == "length"


def png(width: int, height: int, data: bytes = b"") -> str:
    """The data URL of a PNG that claims a size; without data, decoding it would fail."""

    def chunk(name: bytes, body: bytes) -> bytes:
        crc = struct.pack(">I", zlib.crc32(name + body))
        return struct.pack(">I", len(body)) + name + body + crc

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    content = header + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + content).decode()


def with_images(*urls: str) -> list[dict]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": parts}]


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_row_61_a_bomb_is_refused_by_its_header_and_not_logged(  # type: ignore[no-untyped-def]
    engine, tokenizer, api_of, caplog
) -> None:
    caplog.set_level(logging.DEBUG)
    api = api_of(create_app(engine, tokenizer, "scripted"))
    url = png(12_000, 12_000)
    response = api.chat(messages=with_images(url))
    assert response.status_code == 400
    assert "pixels" in response.json()["error"]["message"]
    assert url[30:60] not in response.text + caplog.text


@pytest.mark.parametrize("is_streamed", [False, True])
def test_row_61_no_log_holds_the_message_of_an_unforeseen_exception(  # type: ignore[no-untyped-def]
    url, engine, script, caplog, monkeypatch, is_streamed
) -> None:
    monkeypatch.setattr(logging.getLogger("uvicorn"), "propagate", True)
    engine.scripts = [Script(script("ab"), spans=(1,))]
    fed, problem = [], "the secret prompt"

    def broken(choice, events):  # type: ignore[no-untyped-def]
        fed.append(events)
        if len(fed) == 2:
            raise RuntimeError(problem)
        return [{"delta": {"role": "assistant"}, "finish_reason": None}]

    monkeypatch.setattr(ChatChoice, "feed", broken)
    body = {"model": "scripted", "messages": [USER], "stream": is_streamed}
    response = httpx.post(f"{url}/v1/chat/completions", json=body)
    assert response.status_code == (200 if is_streamed else 500)
    (error,) = [x for x in response.text.split("data: ") if "internal error" in x]
    assert json.loads(error)["error"]["type"] == "server_error"
    assert "RuntimeError" in caplog.text
    assert "secret" not in caplog.text + response.text


def test_row_62_images_of_three_sizes_in_one_request(engine, tokenizer, api_of, script) -> None:  # type: ignore[no-untyped-def]
    engine.scripts = [script("<|end_of_msg|>")]
    api = api_of(create_app(engine, tokenizer, "scripted"))
    sizes = [(28, 28), (84, 28), (30, 150)]
    urls = [png(w, h, b"".join(b"\0" + b"\x80" * (3 * w) for _ in range(h))) for w, h in sizes]
    assert api.chat(messages=with_images(*urls)).status_code == 200
    images = engine.requests[0].images
    assert images.grid_thws.tolist() == [[1, 2, 2], [1, 2, 6], [1, 12, 4]]
    assert len(images.pixel_values) == 4 + 12 + 48


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254/latest/meta-data",
        "http://2852039166/",
        "https://user:secret@example.com/x.png",
        "https://example.com@127.0.0.1/x.png",
        "http://[::ffff:127.0.0.1]/x.png",
        "file://localhost/etc/passwd",
        "//example.com/x.png",
        " data:image/png;base64,AAAA",
    ],
)
def test_row_64_no_url_is_ever_fetched(api, engine, monkeypatch, url) -> None:  # type: ignore[no-untyped-def]
    def no_network(*args: object, **kwargs: object) -> None:
        raise AssertionError(f"a connection to {args}")

    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    monkeypatch.setattr(socket.socket, "connect", no_network)
    response = api.chat(messages=with_images(url))
    assert response.status_code == 400
    assert "data URLs" in response.json()["error"]["message"]
    assert "secret" not in response.text
    assert not engine.requests
