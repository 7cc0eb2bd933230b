"""Limits of a request: headers, body, depth, time, concurrency of a key (serving 8)."""

import asyncio
import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3_core.errors import K3Error
from k3_serve.limits import Limits, is_nested_deeper, nesting, schema_bytes
from k3_serve.ops.auth import TENANT
from k3_serve.ops.requests import Concurrency, RequestLimit, SlowReader

JSON = st.recursive(
    st.none() | st.integers() | st.text(),
    lambda child: st.lists(child, max_size=3) | st.dictionaries(st.text(), child, max_size=3),
    max_leaves=12,
)


def depth_of(value: object) -> int:
    """By the parsed value: the definition."""
    if not isinstance(value, dict | list):
        return 0
    children = value.values() if isinstance(value, dict) else value
    return 1 + max(map(depth_of, children), default=0)


@given(JSON, st.booleans())
def test_nesting_is_that_of_the_parsed_value(value, is_ascii) -> None:  # type: ignore[no-untyped-def]
    body = json.dumps(value, ensure_ascii=is_ascii).encode("utf-8", "surrogatepass")
    assert nesting(body) == depth_of(value)
    for depth in range(4):
        assert is_nested_deeper(body, depth) == (depth_of(value) > depth)


@pytest.mark.parametrize(
    ("body", "depth"),
    [
        (b"", 0),
        (b'"[[[["', 0),
        (b'{"a\\"[[": ["\\\\", "]"]}', 2),
        (b'["\\\\", [["x"]]]', 3),
        (b'["unterminated [[[', 4),  # no JSON: whatever is said, the parser refuses it
        (b"]]]][[", 0),
        (b"[" * 1000, 1000),
    ],
)
def test_nesting_of_odd_texts(body, depth) -> None:  # type: ignore[no-untyped-def]
    assert nesting(body) == depth


def test_nesting_of_a_large_body_is_quick() -> None:
    body = b'{"messages": [' + b'{"image": "' + b"A" * 30_000_000 + b'"}, ' + b"{}," * 100 + b"{}]}"
    start = time.perf_counter()
    assert not is_nested_deeper(body, 64)
    assert time.perf_counter() - start < 2


def test_limits_must_be_positive_and_schemas_have_a_size() -> None:
    with pytest.raises(K3Error, match="max_depth is 0"):
        Limits(max_depth=0)
    assert schema_bytes({"type": "object", "d": "\u00e9"}) == len('{"type":"object","d":"e"}') + 1


LIMITS = Limits(max_body_bytes=100, max_header_bytes=200, max_depth=3, body_seconds=0.2)


async def echo(scope, receive, send) -> None:  # type: ignore[no-untyped-def]
    message = await receive()
    assert not message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": message["body"]})


def call(app, pieces=(b"",), headers=(), method="POST", **more):  # type: ignore[no-untyped-def]
    """Status, headers and body of one request; a piece None means that nothing follows."""
    sent: list[dict] = []

    async def main() -> None:
        left = list(pieces)

        async def receive() -> dict:
            if not left:
                return {"type": "http.disconnect"}
            if (piece := left.pop(0)) is None:
                await asyncio.sleep(60)
            return {"type": "http.request", "body": piece, "more_body": bool(left)}

        async def send(message: dict) -> None:
            sent.append(message)

        scope = {"type": "http", "method": method, "path": "/", "headers": list(headers), **more}
        await app(scope, receive, send)

    asyncio.run(main())
    if not sent:
        return None
    body = b"".join(message.get("body", b"") for message in sent)
    return sent[0]["status"], dict(sent[0]["headers"]), body


@pytest.mark.parametrize(
    ("pieces", "headers", "status"),
    [
        ([b"{}"], [], 200),
        ([b"{", b"}"], [], 200),
        ([b"x" * 100], [], 200),
        ([b"x" * 60, b"x" * 41], [], 413),
        ([b""], [(b"content-length", b"101")], 413),
        ([b""], [(b"content-length", b"9" * 5000)], 431),
        ([b""], [(b"content-length", b"9" * 100)], 413),
        ([b""], [(b"content-length", b"-1")], 413),
        ([b"{}", None], [], 408),
        ([b"{}"], [(b"x", b"y" * 200)], 431),
        ([b"[[[]]]"], [], 200),
        ([b"[[[", b"[]]]]"], [], 400),
        ([b'{"a": "[[[[[["}'], [], 200),
        (["[]".encode("utf-16")], [], 400),
        (["[]".encode("utf-32-le")], [], 400),
        (["\ufeff[]".encode()], [], 200),
    ],
)
def test_a_request_is_bounded_before_it_is_parsed(pieces, headers, status) -> None:  # type: ignore[no-untyped-def]
    answered, _, body = call(RequestLimit(echo, LIMITS), pieces, headers)
    assert answered == status
    if status == 200:
        assert body == b"".join(pieces)
    else:
        assert json.loads(body)["error"]["type"] == "invalid_request_error"


def test_a_long_address_is_refused() -> None:
    answered, _, _ = call(RequestLimit(echo, LIMITS), raw_path=b"/" + b"x" * 300)
    assert answered == 431


def test_a_client_that_goes_away_while_sending_gets_no_answer() -> None:
    async def receive() -> dict:
        return {"type": "http.disconnect"}

    async def unreached(*_: object) -> None:
        raise AssertionError

    scope = {"type": "http", "headers": []}
    asyncio.run(RequestLimit(unreached, LIMITS)(scope, receive, unreached))


def test_a_key_has_so_many_requests_at_a_time() -> None:
    async def main() -> list[int]:
        release = asyncio.Event()
        answers: list[int] = []

        async def app(scope, receive, send) -> None:  # type: ignore[no-untyped-def]
            await release.wait()
            if scope["path"] == "/broken":
                raise ValueError
            await send({"type": "http.response.start", "status": 200, "headers": []})

        async def one(limit, tenant, path="/", method="POST") -> None:  # type: ignore[no-untyped-def]
            async def send(message: dict) -> None:
                if message["type"] == "http.response.start":
                    answers.append(message["status"])
                    if message["status"] == 429:
                        assert (b"retry-after", b"1") in message["headers"]

            scope = {"type": "http", "method": method, "path": path, "headers": [], TENANT: tenant}
            await limit(scope, None, send)

        limit = Concurrency(app, 2)
        tasks = [asyncio.create_task(one(limit, "a", path)) for path in ("/", "/broken")]
        await asyncio.sleep(0)
        await one(limit, "a")  # a third of this key
        tasks.append(asyncio.create_task(one(limit, "b")))  # another key has its own
        tasks.append(asyncio.create_task(one(limit, "a", method="GET")))  # what answers at once
        await asyncio.sleep(0)
        release.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        await one(limit, "a")  # both places are free again, also of the one that failed
        await one(limit, "a")
        return answers

    assert asyncio.run(main()) == [429, 200, 200, 200, 200, 200]


def test_a_reader_that_stands_still_is_given_up(caplog) -> None:  # type: ignore[no-untyped-def]
    freed = []

    async def app(scope, receive, send) -> None:  # type: ignore[no-untyped-def]
        try:
            await send({"type": "http.response.body", "body": b"x"})
        finally:
            freed.append(True)

    async def stuck(_: dict) -> None:
        await asyncio.sleep(60)

    async def main() -> None:
        async with asyncio.timeout(5):
            await SlowReader(app, 0.05)({"type": "http"}, None, stuck)

    asyncio.run(main())
    assert freed
    assert "a client read nothing for 0.05 s" in caplog.text


def test_a_slow_reader_and_a_slow_answer_are_not_given_up() -> None:
    sent = []

    async def app(scope, receive, send) -> None:  # type: ignore[no-untyped-def]
        await asyncio.sleep(0.12)  # an answer may take its time, however little one send may
        for part in range(6):
            await send({"type": "http.response.body", "body": b"x%d" % part})

    async def slow(message: dict) -> None:
        await asyncio.sleep(0.03)
        sent.append(message)

    asyncio.run(SlowReader(app, 0.08)({"type": "http"}, None, slow))
    assert len(sent) == 6


def test_another_failure_of_a_reader_is_not_swallowed() -> None:
    async def app(*_: object) -> None:
        raise TimeoutError("of something else")

    with pytest.raises(TimeoutError, match="something else"):
        asyncio.run(SlowReader(app, 1)({"type": "http"}, None, None))
