"""`k3 top`: what it reads off a server's metrics, and how it says that it cannot."""

import httpx
import pytest
from rich.console import Console

from k3_core.cli.app import run
from k3_core.errors import K3Error
from k3_serve import top
from k3_serve.ops.metrics import Metrics


def shown(frame) -> dict[str, str]:  # type: ignore[no-untyped-def]
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(frame)
    rows = [line.strip("│┃ ").split("│") for line in console.export_text().splitlines()]
    return {row[0].strip(): row[1].strip() for row in rows if len(row) == 2}


def snapshot(metrics: Metrics) -> top.Snapshot:
    return top.parse(metrics.render().decode())


def test_rates_are_of_the_last_look_and_shares_of_the_whole() -> None:
    metrics, label = Metrics("m"), {"class": "short"}
    metrics.count("k3_prompt_tokens_total", 500, label)
    metrics.observe("k3_ttft_seconds", 9.0, label)
    before = snapshot(metrics)
    metrics.count("k3_prompt_tokens_total", 100, label)
    metrics.observe("k3_ttft_seconds", 0.2, label)
    metrics.observe("k3_ttft_seconds", 0.4, {"class": "long"})
    metrics.set("k3_requests_running", 3, {"class": "all"})
    metrics.count("k3_requests_total", 4, {"outcome": "stop", **label})
    metrics.count("k3_requests_total", 1, {"outcome": "error", **label})
    metrics.set("k3_pages", 7, {"state": "cached"})
    metrics.count("k3_cache_lookup_tokens_total", 200)
    metrics.count("k3_mla_match_tokens_total", 150)
    metrics.count("k3_state_hit_tokens_total", 100)
    rows = shown(top.frame(snapshot(metrics), before, 2.0))
    assert rows["running"] == "3"
    assert (rows["ended"], rows["of them failed"]) == ("5", "1")
    assert rows["prompt tokens/s"] == "50.0"
    assert rows["first token"] == "300 ms"
    assert rows["next token"] == "-"
    assert rows["pages cached"] == "7"
    assert (rows["latents matched"], rows["state hit"]) == ("75.0%", "50.0%")


def test_it_reads_a_server_and_ends(url, api, engine, script, capsys) -> None:  # type: ignore[no-untyped-def]
    engine.scripts = [script("<|end_of_msg|>")]
    assert api.chat().status_code == 200
    assert run(["top", "--url", url, "--count", "2", "--interval", "0.1"]) == 0
    assert "requests and tokens" in capsys.readouterr().out


def test_what_keeps_it_from_reading_is_named(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    assert run(["top", "--url", "http://127.0.0.1:1"]) == 2
    for status, message in ((401, "put it into K3_API_KEYS"), (404, "answered 404")):
        transport = httpx.MockTransport(lambda _, status=status: httpx.Response(status))
        with (
            httpx.Client(transport=transport, base_url="http://k3") as client,
            pytest.raises(K3Error, match=message),
        ):
            top.read(client)
    monkeypatch.setenv("K3_API_KEYS", "first, second")
    assert top._headers() == {"Authorization": "Bearer first"}


def test_the_tiers_are_shown_when_there_are_some() -> None:
    metrics = Metrics("tiny")
    empty = shown(top.frame(snapshot(metrics), snapshot(metrics), 1.0))
    assert not any("tier" in name for name in empty)
    before = snapshot(metrics)
    for kind in ("state", "mla"):
        metrics.set("k3_cache_bytes", 2**20, {"kind": kind, "tier": "cpu"})
        metrics.observe("k3_cache_restore_seconds", 0.02, {"kind": kind, "tier": "cpu"})
    for result in ("hit", "miss", "miss", "miss"):
        metrics.count("k3_tier_lookups_total", 1, {"tier": "cpu", "result": result})
    metrics.count("k3_restore_fallback_total", 2, {"reason": "short"})
    rows = shown(top.frame(snapshot(metrics), before, 1.0))
    assert (rows["MiB in the cpu tier"], rows["tier look-ups that hit"]) == ("2.0", "25.0%")
    assert (rows["restore"], rows["restores given up"]) == ("20 ms", "2")
