"""The wire of `k3 bench serve`: requests as a server reads them, answers however they end."""

from __future__ import annotations

import asyncio
import itertools
import json

import httpx
import pytest

from k3_core.errors import K3Error
from k3_serve.bench.client import LoadClient
from k3_serve.bench.wire import opened, post
from k3_serve.bench.workloads import synthetic

HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


def exchange(answer: bytes, *, closes: bool = True, silence: float = 5.0):  # type: ignore[no-untyped-def]
    """What a server was asked and what came back of its answer, timed 1, 2, ..."""
    asked = bytearray()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.extend(await reader.readuntil(b"\r\n\r\n"))
        length = int(asked.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        asked.extend(await reader.readexactly(length))
        writer.write(answer)
        if not closes:
            await reader.read()
        writer.close()

    async def main():  # type: ignore[no-untyped-def]
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            host, port = server.sockets[0].getsockname()
            url = httpx.URL(f"http://{host}:{port}/base/v1/completions")
            now = itertools.count(1.0).__next__
            return await post(url, {"X-Key": "k"}, {"prompt": [1]}, now=now, silence=silence)

    return asyncio.run(main()), bytes(asked)


def test_the_request_is_http_and_closes_its_connection() -> None:
    received, asked = exchange(HEAD + b"\r\nbody")
    head, _, body = asked.partition(b"\r\n\r\n")
    first, *fields = head.split(b"\r\n")
    assert first == b"POST /base/v1/completions HTTP/1.1"
    found = dict(field.lower().split(b": ") for field in fields)
    assert found[b"host"].startswith(b"127.0.0.1:") and found[b"x-key"] == b"k"
    assert found[b"connection"] == b"close" and found[b"content-type"] == b"application/json"
    assert json.loads(body) == {"prompt": [1]}
    assert opened(received) == (200, [(1.0, b"body")])


def test_chunks_have_the_times_of_their_bytes() -> None:
    whole = CHUNKED + b"3\r\nabc\r\n4\r\ndefg\r\n0\r\n\r\n"
    for cut in range(len(CHUNKED), len(whole)):
        status, pieces = opened([(1.0, whole[:cut]), (2.0, whole[cut:])])
        assert status == 200
        assert b"".join(data for _, data in pieces) == b"abcdefg"
        early = b"".join(data for at, data in pieces if at == 1.0)
        assert len(early) == sum(whole[len(CHUNKED) : cut].count(letter) for letter in b"abcdefg")


@pytest.mark.parametrize(
    "answer, problem",
    [
        (b"", "no answer came|no whole answer"),
        (CHUNKED + b"3\r\nabc\r\n4\r\nde", "no whole answer came"),
        (HEAD + b"Content-Length: 9\r\n\r\nabc", "no whole answer came"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "no whole answer came"),
    ],
)
def test_a_part_of_an_answer_is_an_error(answer, problem) -> None:  # type: ignore[no-untyped-def]
    received, _ = exchange(answer)
    with pytest.raises(ValueError, match=problem):
        opened(received)


def test_a_silent_server_is_given_up() -> None:
    with pytest.raises(TimeoutError, match=r"nothing came for 0.05 s"):
        exchange(HEAD, closes=False, silence=0.05)


def test_a_server_that_is_not_there_fails_the_request() -> None:
    load = synthetic(0, num_requests=1, prompt_tokens=1, output_tokens=1, concurrency=1)
    (record,) = LoadClient("http://127.0.0.1:9", model="m").run(load)
    assert record.error.startswith("ConnectionRefusedError")


def test_what_is_no_address_is_refused() -> None:
    with pytest.raises(K3Error, match="'localhost:8000' is no address"):
        LoadClient("localhost:8000")
