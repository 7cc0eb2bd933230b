"""The state of several parts as one mapping of tensors by name, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def join(parts: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Every tensor of every part, as `part.name`."""
    return {
        f"{part}.{name}": tensor
        for part, tensors in parts.items()
        for name, tensor in tensors.items()
    }


def part_of(tensors: Mapping[str, Tensor], part: str) -> dict[str, Tensor]:
    """What `join` took from one part, by its own names."""
    prefix = f"{part}."
    return {name[len(prefix) :]: t for name, t in tensors.items() if name.startswith(prefix)}
