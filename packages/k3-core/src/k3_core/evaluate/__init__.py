"""Measuring a model: question families of `k3_core.tasks`, bits per byte on held-out text."""

from typing import TYPE_CHECKING

from k3_core.lazy import lazy_attributes

if TYPE_CHECKING:
    from k3_core.evaluate.nano import evaluate_nano
else:
    __getattr__ = lazy_attributes(__name__, {"evaluate_nano": "k3_core.evaluate.nano"})

__all__ = ["evaluate_nano"]
