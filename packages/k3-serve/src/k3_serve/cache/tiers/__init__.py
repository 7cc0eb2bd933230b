"""Slower, larger places for prefixes that the arena evicts: host memory, then files (9b, 9c).

A state and the latents of its whole prefix go down and come up together. The keys hold the
version of the weights and the tenant's salt; files also hold a fingerprint of the weights.
"""

from k3_serve.cache.tiers.opening import open_tiers, space_of
from k3_serve.cache.tiers.store import TierStats, TierStore
from k3_serve.cache.tiers.worker import ThreadWorker, Worker

__all__ = ["ThreadWorker", "TierStats", "TierStore", "Worker", "open_tiers", "space_of"]
