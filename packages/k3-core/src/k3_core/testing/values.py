"""Inputs of conformance cases: drawn from a seed, the same for every implementation.

A case draws in float64 and rounds once, so that the implementation and the float64 reference get
the same numbers and the difference is that of the computation alone.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Slot = int | str
"""Position of a positional argument, or name of a keyword argument."""


@dataclass(frozen=True)
class Call:
    """Arguments of one call of an op.

    constants: float arguments that need no gradient. mutated: arguments written in place, which
    are compared after the call.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    constants: tuple[Slot, ...] = ()
    mutated: tuple[Slot, ...] = ()

    def get(self, slot: Slot) -> Any:
        """The argument in a slot."""
        return self.args[slot] if isinstance(slot, int) else self.kwargs[slot]

    def map(self, function: Callable[[Tensor], Tensor]) -> "Call":
        """The same call with every tensor replaced, also those in lists and tuples."""
        return Call(
            args=tuple(map_tensors(function, arg) for arg in self.args),
            kwargs={name: map_tensors(function, arg) for name, arg in self.kwargs.items()},
            constants=self.constants,
            mutated=self.mutated,
        )

    def leaves(self) -> dict[str, Tensor]:
        """The float tensors that get gradients, by a readable name."""
        slots: list[Slot] = [*range(len(self.args)), *self.kwargs]
        found: dict[str, Tensor] = {}
        for slot in slots:
            if slot in self.constants:
                continue
            value = self.get(slot)
            items = value if isinstance(value, list | tuple) else [value]
            for number, item in enumerate(items):
                if isinstance(item, Tensor) and item.is_floating_point():
                    found[f"argument {slot}" + f"[{number}]" * (len(items) > 1)] = item
        return found


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Apply a function to a tensor or to those of a list or tuple; other values stay."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(function, item) for item in value)
    return value


class Values:
    """Draws tensors for one case.

    dtype: of activations. What the models keep in full precision (`full`) is float32, or float64
    when the activations are.
    """

    def __init__(self, dtype: torch.dtype, device: str, seed: int = 0) -> None:
        self.dtype, self.device = dtype, device
        self.math_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self._generator = torch.Generator().manual_seed(seed)

    def act(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Normal values in the activation dtype."""
        return self._normal(shape, scale).to(self.device, self.dtype)

    def full(self, *shape: int, scale: float = 1.0, shift: float = 0.0) -> Tensor:
        """Normal values in full precision."""
        return (self._normal(shape, scale) + shift).to(self.device, self.math_dtype)

    def integers(self, high: int, *shape: int) -> Tensor:
        """Integers in 0..high-1 (int64)."""
        return torch.randint(high, shape, generator=self._generator).to(self.device)

    def distinct(self, high: int, rows: int, count: int) -> Tensor:
        """`count` distinct integers in 0..high-1 for each row (int64 [rows, count])."""
        draws = torch.rand(rows, high, generator=self._generator)
        return draws.argsort(-1)[:, :count].to(self.device)

    def offsets(self, lengths: tuple[int, ...]) -> Tensor:
        """int64 cumulative lengths, 0 first."""
        return torch.tensor((0, *lengths)).cumsum(0).to(self.device)

    def _normal(self, shape: tuple[int, ...], scale: float) -> Tensor:
        return scale * torch.randn(shape, generator=self._generator, dtype=torch.float64)
