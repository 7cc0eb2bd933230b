"""Declarations of the kernels beside KDA; imports no torch."""

from k3_core.plugins import Impl

IMPLS: list[Impl] = []
