"""Declarations of the presets for the registry; imports nothing but the registry."""

from __future__ import annotations

from k3_core.plugins import Impl

_SUMMARIES = {
    "k3": "the released 2.78T model (meta device only)",
    "k3-mini": "1B parameters, 0.15B active: speed is measured here",
    "k3-nano": "the bundled model, under 12 MB",
    "k3-test": "under 1M parameters, for tests",
    "k3-test-vision": "k3-test with a small vision tower, for first runs with pictures",
}


def implementations() -> list[Impl]:
    """The presets of k3-core."""
    return [
        Impl(
            kind="preset",
            name=name,
            implements=name,
            target=f"k3_core.config.presets:{name.replace('-', '_')}",
            summary=summary,
        )
        for name, summary in _SUMMARIES.items()
    ]
