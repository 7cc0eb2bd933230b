"""What a scrape reads off the engine: its load, its pages and the counters of its cache (9e)."""

from __future__ import annotations

from typing import Any

from k3_core.engine import Engine
from k3_serve.ops.metrics import Metrics

CACHE_COUNTERS = {
    "lookup_tokens": "k3_cache_lookup_tokens_total",
    "latent_match_tokens": "k3_mla_match_tokens_total",
    "hit_tokens": "k3_state_hit_tokens_total",
    "uncached_common_prefix_tokens": "k3_uncached_common_prefix_tokens_total",
    "checkpoint_hits": "k3_state_checkpoint_hits_total",
    "checkpoint_misses": "k3_state_checkpoint_misses_total",
    "checkpoints_taken": "k3_state_checkpoint_taken_total",
    "checkpoints_recycled": "k3_state_checkpoint_recycled_total",
    "checkpoints_evicted": "k3_state_checkpoint_evicted_total",
}


class EngineCollector:
    """Call it before a scrape. An engine without a prefix cache shows its load only."""

    def __init__(self, engine: Engine, metrics: Metrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self._seen: dict[str, int] = {}

    def __call__(self) -> None:
        stats, label = self._engine.stats(), {"class": "all"}
        self._metrics.set("k3_requests_running", stats.num_running, label)
        self._metrics.set("k3_requests_waiting", stats.num_waiting, label)
        self._advance("k3_engine_restarts_total", getattr(self._engine, "num_restarts", 0))
        cache_stats = getattr(self._engine, "cache_stats", None)
        if cache_stats is not None:
            self._cache(cache_stats())

    def _cache(self, cache: Any) -> None:
        for state in ("free", "active", "cached"):
            self._metrics.set("k3_pages", getattr(cache, f"num_{state}"), {"state": state})
        self._metrics.set("k3_requests_restoring", cache.num_restoring, {"class": "all"})
        for tier in cache.tiers:
            self._metrics.set("k3_tier_prefixes", tier.num_prefixes, {"tier": tier.tier})
            for kind, held in (("state", tier.state_bytes), ("mla", tier.mla_bytes)):
                self._metrics.set("k3_cache_bytes", held, {"kind": kind, "tier": tier.tier})
        for field, name in CACHE_COUNTERS.items():
            self._advance(name, getattr(cache.counters, field))
        self._advance("k3_preemptions_total", cache.num_preemptions, {"class": "all"})

    def _advance(self, name: str, total: int, labels: dict[str, str] | None = None) -> None:
        """Adds what is new of a sum; one that fell began anew, as after a restart or a sleep."""
        seen = self._seen.get(name, 0)
        self._metrics.count(name, total - seen if total >= seen else total, labels or {})
        self._seen[name] = total
