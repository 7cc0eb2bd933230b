"""The interface of a memory policy. N values of a tensor in the order of memory.

A policy may act on calls of annotated functions, on what autograd saves inside them, or on both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor


@dataclass(eq=False)
class Packed:
    """What a policy keeps in place of saved values.

    parts: tensors; a part that another policy packed is that policy's `Packed`.
    restore: from the parts, as tensors, to the values [N] in their dtype.
    """

    parts: Sequence[Any]
    restore: Callable[..., Tensor]

    def unpack(self) -> Tensor:
        """The values [N]; asked for in the backward, once for each place that saved them."""
        return self.restore(*(x.unpack() if isinstance(x, Packed) else x for x in self.parts))


class MemoryPolicy:
    """Base of all policies; one object a model, built as `target(device)` by the name in settings.

    order: several policies on the same tensor pack it in ascending order, each the parts of the
    one before: first what makes a tensor smaller, then what moves it.
    runs_again: whether an annotated function runs in the backward once more.
    is_exact: whether it gives back what it packed, bit for bit.
    hides_outer: inside an annotated function, entries around it do not apply.
    """

    order: ClassVar[int] = 0
    runs_again: ClassVar[bool] = False
    is_exact: ClassVar[bool] = True
    hides_outer: ClassVar[bool] = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def packs(self) -> bool:
        """Whether it acts on saved tensors."""
        return type(self).pack is not MemoryPolicy.pack

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run an annotated function, where gradients are recorded."""
        return function(*args, **kwargs)

    def wants(self, x: Tensor) -> bool:
        """Whether to pack a saved tensor, as autograd saves it (parameters are never offered).

        `x.requires_grad` tells a value of the graph from what an op keeps for itself.
        """
        return False

    def pack(self, values_N: Tensor) -> Packed:
        """Take the contiguous values of a tensor that `wants` accepted; no reference may stay."""
        raise NotImplementedError(f"{type(self).__name__} acts on calls only")


class Keep(MemoryPolicy):
    """What is saved stays as it is, also inside of annotated functions."""

    hides_outer = True
