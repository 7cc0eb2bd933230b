"""Requests as the internet sends them: disconnects, malformed bodies, readers that stand still.

Afterwards no page is in use, nothing runs, and every well-formed request was answered (serving 5C,
rows 55 and 32).
"""

import asyncio
import contextlib
import json
import random
import time
from dataclasses import dataclass

import pytest
import torch

from k3_serve.api.app import create_app
from k3_serve.engine.core import ContinuousEngine
from k3_serve.testing import tiny_model

NUM_PAGES = 96
MALFORMED = (
    b"",
    b"{",
    b"\xff\xfe",
    b"[" * 5000,
    b'{"model": "soak"}',
    b'{"model": "other", "prompt": "x"}',
    b'{"model": "soak", "prompt": "x", "max_tokens": -1}',
    b'{"model": "soak", "prompt": [999999999]}',
    b'{"model": "soak", "prompt": "x", "max_tokens": 1e999}',
    b"{}" * 3,
)
PREFIXES = [[7, 8, 9] * 20, [100] * 40, list(range(90))]


@dataclass
class Tally:
    answered: int = 0
    refused: int = 0
    left: int = 0


def well_formed(rng: random.Random, is_streamed: bool) -> bytes:
    prefix = rng.choice(PREFIXES)
    prompt = prefix[: rng.randint(1, len(prefix))] + [rng.randrange(256) for _ in range(5)]
    fields = {"prompt": prompt, "max_tokens": rng.randint(1, 8), "seed": 0, "stream": is_streamed}
    if rng.random() < 0.1:
        fields["n"] = 3
    return json.dumps({"model": "soak", **fields}).encode()


async def one(port: int, rng: random.Random, tally: Tally) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    kind = rng.choice(["whole", "stream", "slow", "malformed", "leave", "leave early", "half"])
    if kind == "malformed":
        body = rng.choice(MALFORMED)
    else:
        body = well_formed(rng, kind != "whole" and rng.random() < 0.8)
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: k3\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with contextlib.suppress(ConnectionError):
        writer.write(head.encode() + (body[: len(body) // 2] if kind == "half" else body))
        await writer.drain()
        if kind == "half" or kind == "leave early":
            await asyncio.sleep(rng.random() * 0.02)
        elif kind == "leave":
            await reader.read(rng.randint(1, 300))
        else:
            if kind == "slow":
                await asyncio.sleep(rng.random() * 0.2)
            check(kind, await reader.read(-1), tally)
    tally.left += kind in ("half", "leave", "leave early")
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


def check(kind: str, answer: bytes, tally: Tally) -> None:
    status = answer[9:12]
    if kind == "malformed":
        assert status in (b"400", b"404"), answer[:300]
        tally.refused += 1
        return
    assert status == b"200", answer[:300]
    assert b'"error"' not in answer
    assert b'"finish_reason": "' in answer or b'"finish_reason":"' in answer
    tally.answered += 1


async def many(port: int, count: int, at_once: int) -> Tally:
    rng, tally, gate = random.Random(0), Tally(), asyncio.Semaphore(at_once)

    async def bounded(seed: int) -> None:
        async with gate:
            await asyncio.wait_for(one(port, random.Random(seed), tally), 60)

    await asyncio.gather(*(bounded(rng.randrange(2**32)) for _ in range(count)))
    return tally


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_no_page_and_no_request_is_left_behind(tokenizer, serving_of, count) -> None:  # type: ignore[no-untyped-def]
    options = {"unit": 16, "num_pages": NUM_PAGES, "max_batch": 4, "token_budget": 64}
    with ContinuousEngine(tiny_model(torch.float32), tokenizer, **options) as engine:
        with serving_of(create_app(engine, tokenizer, "soak")) as url:
            tally = asyncio.run(many(int(url.rsplit(":", 1)[1]), count, 16))
            deadline = time.monotonic() + 10
            while engine.stats().num_running or engine.stats().num_waiting:
                assert time.monotonic() < deadline, engine.stats()
                time.sleep(0.01)
        assert tally.answered + tally.refused + tally.left == count
        assert min(tally.answered, tally.refused, tally.left) > count // 20
        stats, cache = engine.stats(), engine.cache_stats()
        assert stats.num_failed == 0
        assert engine.num_restarts == 0
        assert cache.num_active == 0
        assert cache.num_free + cache.num_cached == NUM_PAGES
