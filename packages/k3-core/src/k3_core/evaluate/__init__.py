"""Measuring a model: question families of `k3_core.tasks`, bits per byte on held-out text."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from k3_core.evaluate.nano import evaluate_nano

__all__ = ["evaluate_nano"]


def __getattr__(name: str) -> object:
    if name != "evaluate_nano":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {__all__}")
    from k3_core.evaluate.nano import evaluate_nano

    return evaluate_nano
