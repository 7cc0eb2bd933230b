"""What the cache of an engine holds and has done, at one moment."""

from __future__ import annotations

from dataclasses import dataclass, replace

from k3_serve.cache.records import CacheCounters
from k3_serve.cache.tiers import TierStats, TierStore
from k3_serve.engine.scheduler import Scheduler


@dataclass(frozen=True)
class CacheStats:
    """The arena's pages by state, and the sums of the index."""

    num_pages: int
    num_free: int
    num_active: int
    num_cached: int
    num_preemptions: int
    counters: CacheCounters
    num_restoring: int = 0
    """Requests that wait for a tier."""
    tiers: tuple[TierStats, ...] = ()


def stats_of(scheduler: Scheduler, num_restoring: int, tiers: TierStore | None) -> CacheStats:
    """Read from another thread than the engine's: they may lag by the running step."""
    pool = scheduler.index.pool
    return CacheStats(
        pool.num_pages,
        pool.num_free,
        pool.num_active,
        pool.num_cached,
        scheduler.num_preemptions,
        replace(scheduler.index.counters),
        num_restoring,
        () if tiers is None else tuple(tiers.stats()),
    )
