"""What this package declares to the registry; imports no torch. Source: design 3 (registry)."""

from k3_core.plugins import Impl


def implementations() -> list[Impl]:
    """The declarations of this package."""
    return []
