"""The prefix cache: pages, keys, index and eviction in pure Python (report 5.4; architecture 6)."""

from k3_serve.cache.index import PrefixIndex
from k3_serve.cache.keys import extend_unit_keys, seed_key, unit_keys
from k3_serve.cache.pages import OutOfPages, PagePool
from k3_serve.cache.records import (
    CHECKPOINT_KINDS,
    CacheCounters,
    Checkpoint,
    EvictedCheckpoint,
    EvictedPages,
    Match,
    StaleMatch,
)

__all__ = [
    "CHECKPOINT_KINDS",
    "CacheCounters",
    "Checkpoint",
    "EvictedCheckpoint",
    "EvictedPages",
    "Match",
    "OutOfPages",
    "PagePool",
    "PrefixIndex",
    "StaleMatch",
    "extend_unit_keys",
    "seed_key",
    "unit_keys",
]
