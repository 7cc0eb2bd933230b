"""Test doubles of the engine: one stepped by hand, a model and a draft small enough for it."""

from k3_serve.testing.guess import GuessDraft
from k3_serve.testing.stepped import SteppedEngine, tiny_model

__all__ = ["GuessDraft", "SteppedEngine", "tiny_model"]
