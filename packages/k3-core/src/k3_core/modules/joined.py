"""Linears that read the same input as one product, for inference (serving.md 3, fewer launches).

`join` lays the weights of such linears side by side in memory, of which they stay views: names,
shapes and loading are as before. `project` makes one product where they lie so, and `stack` is
free for other weights that a layer uses as one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from k3_core.modules.linear import Linear


def project(x_TD: Tensor, groups: Sequence[Sequence[Linear]]) -> list[Tensor]:
    """The outputs of each group of linears side by side, [T, sum of the group's out]."""
    joined = _usable([linear.weight for group in groups for linear in group])
    if joined is None:
        parts = [[linear(x_TD) for linear in group] for group in groups]
        return [own[0] if len(own) == 1 else torch.cat(own, dim=-1) for own in parts]
    sizes = [sum(len(linear.weight) for linear in group) for group in groups]
    return list(F.linear(x_TD, joined).split(sizes, dim=-1))


def stack(weights: Sequence[Tensor]) -> Tensor:
    """Weights along their first dimension, which differs; a view where they lie side by side."""
    joined = _usable(weights)
    return torch.cat(list(weights)) if joined is None else joined


def join(model: nn.Module) -> None:
    """Lay what modules name `parallel_linears` and `parallel_weights` side by side.

    Call it where the model stays: a later move to another device parts them again, which costs
    speed only. Training reads them one by one, joined or not. What lies so already stays where it
    is: CUDA graphs may have been captured on it.
    """
    for module in model.modules():
        groups = getattr(module, "parallel_linears", ())
        weights = [linear.weight for group in groups for linear in group]
        for parameters in (weights, getattr(module, "parallel_weights", ())):
            if parameters and _joined(parameters) is None:
                _lay(parameters)


def _lay(parameters: Sequence[nn.Parameter]) -> None:
    """Copies them into one tensor of which they become views."""
    whole = torch.cat([parameter.detach() for parameter in parameters])
    parts = whole.split([len(parameter) for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.data = part


def _usable(weights: Sequence[Tensor]) -> Tensor | None:
    """The weights as one, if they lie side by side and no gradient is to reach them."""
    if torch.is_grad_enabled() and any(weight.requires_grad for weight in weights):
        return None
    return _joined(weights)


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
    return first.as_strided((rows, *first.shape[1:]), first.stride())
