"""Caches of a model's layers: what a layer keeps of the past (architecture 3.6)."""
