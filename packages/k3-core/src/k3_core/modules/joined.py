"""Linears that read the same input as one product, for inference (serving.md 3, fewer launches).

`join` lays the weights of such linears side by side in memory, of which they stay views: names,
shapes and loading are as before. `project` makes one product where they lie so.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from k3_core.modules.linear import Linear


def project(x_TD: Tensor, groups: Sequence[Sequence[Linear]]) -> list[Tensor]:
    """The outputs of each group of linears side by side, [T, sum of the group's out]."""
    joined = _joined([linear for group in groups for linear in group])
    if joined is None:
        parts = [[linear(x_TD) for linear in group] for group in groups]
        return [own[0] if len(own) == 1 else torch.cat(own, dim=-1) for own in parts]
    sizes = [sum(len(linear.weight) for linear in group) for group in groups]
    return list(F.linear(x_TD, joined).split(sizes, dim=-1))


def join(model: nn.Module) -> None:
    """Lay the `parallel_linears` of every module side by side; call it where the model stays.

    A later move to another device parts them again, which costs speed only. Training reads them
    one by one, joined or not.
    """
    for module in model.modules():
        groups = getattr(module, "parallel_linears", None)
        if groups is None:
            continue
        linears = [linear for group in groups for linear in group]
        weights = torch.cat([linear.weight.detach() for linear in linears])
        sizes = [len(linear.weight) for linear in linears]
        for linear, weight in zip(linears, weights.split(sizes), strict=True):
            linear.weight.data = weight


def _joined(linears: Sequence[Linear]) -> Tensor | None:
    """The weights as one, if they lie side by side and no gradient is to reach them."""
    first = linears[0].weight
    end = first.data_ptr()
    storage = first.untyped_storage().data_ptr()
    is_training = torch.is_grad_enabled()
    rows = 0
    for linear in linears:
        weight = linear.weight
        is_next = weight.data_ptr() == end and weight.is_contiguous()
        if not is_next or (is_training and weight.requires_grad):
            return None
        if weight.untyped_storage().data_ptr() != storage or weight.dtype != first.dtype:
            return None
        end += weight.nbytes
        rows += len(weight)
    return first.as_strided((rows, first.shape[1]), (first.shape[1], 1))
