"""Test doubles of the engine: one that is stepped by hand, and a model small enough for it."""

from k3_serve.testing.stepped import SteppedEngine, tiny_model

__all__ = ["SteppedEngine", "tiny_model"]
