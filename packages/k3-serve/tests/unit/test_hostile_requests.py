"""The inputs that serving 5C lists for fuzzing: each has one status, and the next one is served."""

import gzip
import json
import socket
from urllib.parse import urlsplit

import pytest

from k3_serve.api.app import create_app
from k3_serve.testing import Script

USER = {"role": "user", "content": "hi"}
ANSWER = "<|close|>think<|sep|><|open|>response<|sep|>four<|close|>response<|sep|><|end_of_msg|>"
JSON = {"Content-Type": "application/json"}


def body(**fields: object) -> bytes:
    return json.dumps({"model": "scripted", "messages": [USER], **fields}).encode()


def message(**fields: object) -> bytes:
    return body(messages=[{**USER, **fields}])


def halves(first: str, second: str) -> bytes:
    parts = [{"type": "text", "text": text} for text in (first, second)]
    return message(content=parts)


MILLION = b'{"model": "scripted", "messages": [' + b"{}," * 999_999 + b"{}]}"
TWICE = b'{"model": "other", "messages": [{"role": "user"}], "model": "scripted"}'
CASES = {
    "no messages": (body(messages=[]), 400),
    "content null": (message(content=None), 200),
    "content empty list": (message(content=[]), 200),
    "unknown role": (message(role="wizard"), 400),
    "a million messages": (MILLION, 400),
    "max_tokens 0": (body(max_tokens=0), 200),
    "max_tokens 1": (body(max_tokens=1), 200),
    "max_tokens beyond the room": (body(max_tokens=4096), 400),
    "max_tokens beyond 64 bits": (body(max_tokens=2**70), 400),
    "a prompt beyond the context": (message(content="x" * 5000), 400),
    "an empty stop": (body(stop=""), 400),
    "a hundred stops": (body(stop=["x"] * 100), 400),
    "a bias on an unknown id": (body(logit_bias={"999999": 1}), 400),
    "a bias on a negative id": (body(logit_bias={"-1": 1}), 400),
    "a bias on an id of 5000 digits": (body(logit_bias={"9" * 5000: 1}), 400),
    "top_logprobs 21": (body(logprobs=True, top_logprobs=21), 400),
    "seed 2^63": (body(seed=2**63), 400),
    "temperature NaN": (body(temperature=float("nan")), 400),
    "temperature 1e999": (body(temperature=0).replace(b": 0}", b": 1e999}"), 400),
    "a key twice": (TWICE, 200),
    "bytes that are no UTF-8": (body().replace(b"hi", b"\xff\xfe"), 400),
    "a pair of surrogates in two parts": (halves("\ud83d", "\ude42"), 200),
    "surrogates in the wrong order": (halves("\ude42", "\ud83d"), 200),
    "gzip": (gzip.compress(body()), 400),
}


@pytest.fixture
def default_api(engine, tokenizer, api_of, script):  # type: ignore[no-untyped-def]
    """The server with its own limits."""
    engine.scripts = [script(ANSWER)]
    return api_of(create_app(engine, tokenizer, "scripted"))


@pytest.mark.parametrize("name", CASES)
def test_a_hostile_body_has_one_status_and_harms_no_other(default_api, engine, name) -> None:  # type: ignore[no-untyped-def]
    content, status = CASES[name]
    headers = JSON | ({"Content-Encoding": "gzip"} if name == "gzip" else {})
    path = "/v1/chat/completions"
    response = default_api.request("POST", path, content=content, headers=headers)
    assert response.status_code == status, response.text
    if status == 200:
        (choice,) = response.json()["choices"]
        assert choice["finish_reason"] in ("stop", "length")
    else:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
        assert len(error["message"]) < 500
        assert not engine.requests
    (choice,) = default_api.chat().json()["choices"]
    assert choice["message"]["content"] == "four"


def raw_request(content: bytes, close: bool = True) -> bytes:
    connection = "close" if close else "keep-alive"
    return (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: k3\r\nConnection: {connection}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    ).encode() + content


@pytest.fixture
def connection(url):  # type: ignore[no-untyped-def]
    """A connection to the server with a small window, so that it soon cannot send."""
    address = urlsplit(url)
    with socket.socket() as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        peer.settimeout(20)
        peer.connect((address.hostname, address.port))
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield peer


def read_all(peer: socket.socket) -> bytes:
    return b"".join(iter(lambda: peer.recv(65536), b""))


def test_requests_in_one_write_are_answered_in_order(connection, engine, script) -> None:  # type: ignore[no-untyped-def]
    engine.scripts = [script(ANSWER.replace("four", number)) for number in ("one", "two")]
    refused = raw_request(body(n=0), close=False)
    connection.sendall(raw_request(body(), close=False) + refused + raw_request(body()))
    answers = read_all(connection).split(b"HTTP/1.1 ")[1:]
    assert [answer[:3] for answer in answers] == [b"200", b"400", b"200"]
    assert b'"one"' in answers[0]
    assert b'"two"' in answers[2]


def test_a_request_byte_by_byte_is_served(connection, engine, script) -> None:  # type: ignore[no-untyped-def]
    engine.scripts = [script(ANSWER)]
    for byte in raw_request(body()):
        connection.sendall(bytes([byte]))
    assert b'"four"' in read_all(connection)


def test_a_reader_that_stands_still_holds_up_no_other(connection, api, engine, script) -> None:  # type: ignore[no-untyped-def]
    text = "a" * 9000
    long = Script(script(ANSWER.replace("four", text)), spans=(1,))
    engine.scripts = [long, script(ANSWER)]
    options = {"stream": True, "logprobs": True, "top_logprobs": 20}
    connection.sendall(raw_request(body(**options)))
    assert connection.recv(100).startswith(b"HTTP/1.1 200")
    for _ in range(3):
        assert api.chat().json()["choices"][0]["message"]["content"] == "four"
    assert "request-0" not in engine.aborted  # it has not ended: the server waits for the reader
    rest = read_all(connection)
    assert rest.count(b'"content":"a"') == len(text)
    assert b"data: [DONE]" in rest
