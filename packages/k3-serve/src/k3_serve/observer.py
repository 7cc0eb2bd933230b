"""Where the engine and the API report figures, without knowing what collects them (serving 9e)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

Labels = Mapping[str, str]
NONE: Labels = {}


class Observer(Protocol):
    """Takes figures by the names of `k3_serve.ops.metrics.TABLE`; callable from any thread.

    An unknown name or label is a KeyError or ValueError: a metric is declared before it is used.
    """

    def count(self, name: str, amount: float = 1.0, labels: Labels = NONE) -> None:
        """Adds to a counter; the amount is at least 0."""

    def observe(self, name: str, value: float, labels: Labels = NONE) -> None:
        """Adds one observation to a histogram, in the unit of its name."""

    def set(self, name: str, value: float, labels: Labels = NONE) -> None:
        """Sets a gauge."""


class Silent:
    """The observer of a program that has no metrics."""

    def count(self, name: str, amount: float = 1.0, labels: Labels = NONE) -> None:
        """Does nothing."""

    def observe(self, name: str, value: float, labels: Labels = NONE) -> None:
        """Does nothing."""

    def set(self, name: str, value: float, labels: Labels = NONE) -> None:
        """Does nothing."""
