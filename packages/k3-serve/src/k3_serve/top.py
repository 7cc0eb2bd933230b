"""`k3 top`: the load, the rates and the prefix cache of a running server, refreshed in place."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Annotated

import httpx
import typer
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from k3_core.errors import K3Error

Snapshot = dict[str, float]
LABELLED = {
    "k3_pages": "state",
    "k3_requests_total": "outcome",
    "k3_cache_bytes": "tier",
    "k3_tier_lookups_total": "result",
}
"""By name, the label by whose values a metric is also summed."""


def top(
    url: Annotated[str, typer.Option(help="A running server.")] = "http://127.0.0.1:8000",
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    count: Annotated[int, typer.Option(min=0, help="Looks; 0 goes on until Ctrl-C.")] = 0,
) -> None:
    """Show a server's load, rates and cache. A key is taken from K3_API_KEYS."""
    with httpx.Client(base_url=url, timeout=10, headers=_headers(), trust_env=False) as client:
        console = Console()
        frames = watch(lambda: read(client), interval, count)
        with Live(next(frames), console=console, auto_refresh=False) as live:
            for frame in frames:
                live.update(frame, refresh=True)


def _headers() -> dict[str, str]:
    key = os.environ.get("K3_API_KEYS", "").split(",")[0].strip()
    return {"Authorization": f"Bearer {key}"} if key else {}


def read(client: httpx.Client) -> Snapshot:
    """The metrics of a server, summed over classes; K3Error when it does not give them."""
    try:
        response = client.get("/metrics")
    except httpx.HTTPError as error:
        raise K3Error(f"no server answers at {client.base_url} ({error}); see --url") from error
    if response.status_code == 401:
        raise K3Error(f"{client.base_url} asks for a key; put it into K3_API_KEYS")
    if response.status_code != 200:
        raise K3Error(f"{client.base_url}/metrics answered {response.status_code}")
    return parse(response.text)


def parse(text: str) -> Snapshot:
    """Sums by name; those of `LABELLED` also by a label, as name/value."""
    sums: Snapshot = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            names = [sample.name]
            if sample.name in LABELLED:
                names.append(f"{sample.name}/{sample.labels.get(LABELLED[sample.name])}")
            for name in names:
                sums[name] = sums.get(name, 0.0) + sample.value
    return sums


def watch(look: Callable[[], Snapshot], interval: float, count: int) -> Iterator[Group]:
    """A frame a look; the rates are those since the look before."""
    before, taken = look(), time.monotonic()
    yield frame(before, before, interval)
    number = 1
    while number != count:
        time.sleep(interval)
        now, at = look(), time.monotonic()
        yield frame(now, before, at - taken)
        before, taken, number = now, at, number + 1


def frame(now: Snapshot, before: Snapshot, seconds: float) -> Group:
    """Two tables: requests and tokens, and the cache."""

    def new(name: str) -> float:
        return now.get(name, 0.0) - before.get(name, 0.0)

    def mean(name: str) -> str:
        count = new(f"{name}_count")
        return f"{1000 * new(f'{name}_sum') / count:.0f} ms" if count else "-"

    def share(part: str, whole: str) -> str:
        total = now.get(whole, 0.0)
        return f"{100 * now.get(part, 0.0) / total:.1f}%" if total else "-"

    load = _table("requests and tokens")
    for state in ("running", "waiting", "restoring"):
        load.add_row(state, f"{now.get(f'k3_requests_{state}', 0):.0f}")
    load.add_row("ended", f"{now.get('k3_requests_total', 0):.0f}")
    load.add_row("of them failed", f"{now.get('k3_requests_total/error', 0):.0f}")
    load.add_row("prompt tokens/s", f"{new('k3_prompt_tokens_total') / seconds:.1f}")
    load.add_row("step tokens/s", f"{new('k3_step_tokens_sum') / seconds:.1f}")
    load.add_row("first token", mean("k3_ttft_seconds"))
    load.add_row("next token", mean("k3_itl_seconds"))
    load.add_row("queue", mean("k3_queue_seconds"))

    cache = _table("prefix cache")
    for state in ("free", "active", "cached"):
        cache.add_row(f"pages {state}", f"{now.get(f'k3_pages/{state}', 0):.0f}")
    looked_up = "k3_cache_lookup_tokens_total"
    cache.add_row("latents matched", share("k3_mla_match_tokens_total", looked_up))
    cache.add_row("state hit", share("k3_state_hit_tokens_total", looked_up))
    missing = "k3_uncached_common_prefix_tokens_total"
    cache.add_row("common but uncached", share(missing, looked_up))
    for name in ("taken", "recycled", "evicted"):
        value = now.get(f"k3_state_checkpoint_{name}_total", 0)
        cache.add_row(f"checkpoints {name}", f"{value:.0f}")
    cache.add_row("preemptions", f"{now.get('k3_preemptions_total', 0):.0f}")
    for tier in ("cpu", "disk"):
        if (held := now.get(f"k3_cache_bytes/{tier}")) is not None:
            cache.add_row(f"MiB in the {tier} tier", f"{held / 2**20:.1f}")
    if "k3_cache_bytes/cpu" in now:
        cache.add_row(
            "tier look-ups that hit", share("k3_tier_lookups_total/hit", "k3_tier_lookups_total")
        )
        cache.add_row("restore", mean("k3_cache_restore_seconds"))
        cache.add_row("restores given up", f"{now.get('k3_restore_fallback_total', 0):.0f}")
    return Group(load, cache)


def _table(title: str) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, min_width=40)
    table.add_column()
    table.add_column(justify="right")
    return table
