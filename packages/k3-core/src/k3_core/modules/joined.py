"""Weights that one call can take as one, for inference (serving.md 3, fewer calls and launches).

A layer names such weights once, as `Stacked` or `Projections`. `join` lays them side by side in
memory, of which they stay views: names, shapes and loading are as before. Where they lie so, the
linears of a `Projections` are one product, and a `Stacked` is one tensor for free.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Stacked:
    """Weights of submodules `names` of `owner`, one below the other."""

    def __init__(self, owner: nn.Module, *names: str) -> None:
        self._owner, self._names = owner, names
        self._addresses: list[int] = []
        self._joined: Tensor | None = None

    def weights(self) -> list[nn.Parameter]:
        """The parameters, as the submodules hold them now."""
        modules = self._owner._modules
        return [modules[name]._parameters["weight"] for name in self._names]  # type: ignore

    def joined(self) -> Tensor | None:
        """The weights as one, if they lie side by side."""
        weights = self.weights()
        addresses = [weight.data_ptr() for weight in weights]
        if addresses != self._addresses:
            self._addresses, self._joined = addresses, _joined(weights)
        return self._joined

    def usable(self) -> Tensor | None:
        """`joined`, if no gradient is to reach the weights."""
        if torch.is_grad_enabled() and any(weight.requires_grad for weight in self.weights()):
            return None
        return self.joined()

    def __call__(self) -> Tensor:
        """The weights along their first dimension; a view where they lie side by side."""
        joined = self.usable()
        return torch.cat(tuple(self.weights())) if joined is None else joined


class Projections:
    """Linears that read the same input, in groups: the names of submodules of `owner`."""

    def __init__(self, owner: nn.Module, *groups: tuple[str, ...]) -> None:
        self.stacked = Stacked(owner, *(name for group in groups for name in group))
        self._owner, self._groups = owner, groups
        rows = iter([weight.shape[0] for weight in self.stacked.weights()])
        self._sizes = [sum(next(rows) for _ in group) for group in groups]

    def __call__(self, x_TD: Tensor) -> Sequence[Tensor]:
        """The outputs of each group side by side, [T, sum of the group's out]."""
        modules = self._owner._modules
        joined = self.stacked.usable()
        if joined is not None:
            whole: Tensor = modules[self._groups[0][0]].product(x_TD, joined)  # type: ignore
            return whole.split_with_sizes(self._sizes, dim=-1)
        parts = [[modules[name](x_TD) for name in group] for group in self._groups]  # type: ignore
        return [own[0] if len(own) == 1 else torch.cat(own, dim=-1) for own in parts]


def join(model: nn.Module) -> None:
    """Lay what modules hold as `Stacked` or `Projections` side by side.

    Call it where the model stays: a later move to another device parts them again, which costs
    speed only. Training reads them one by one, joined or not. What lies so already stays where it
    is: CUDA graphs may have been captured on it.
    """
    for module in model.modules():
        for value in vars(module).values():
            stacked = value.stacked if isinstance(value, Projections) else value
            if isinstance(stacked, Stacked) and stacked.joined() is None:
                _lay(stacked.weights())


def _lay(parameters: Sequence[nn.Parameter]) -> None:
    """Copies them into one tensor of which they become views."""
    whole = torch.cat([parameter.detach() for parameter in parameters])
    parts = whole.split([len(parameter) for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.data = part


def _joined(weights: Sequence[Tensor]) -> Tensor | None:
    """The weights as one, if they lie side by side."""
    first = weights[0]
    end = first.data_ptr()
    storage = first.untyped_storage().data_ptr()
    rows = 0
    for weight in weights:
        if weight.data_ptr() != end or not weight.is_contiguous():
            return None
        if weight.untyped_storage().data_ptr() != storage or weight.dtype != first.dtype:
            return None
        end += weight.nbytes
        rows += len(weight)
    return first.as_strided((rows, *first.shape[1:]), first.stride()).detach()
