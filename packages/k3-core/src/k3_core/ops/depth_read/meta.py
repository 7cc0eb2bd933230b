"""Results of depth_read without values, for graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor


def meta(
    sources: Sequence[Tensor],
    prefix_TD: Tensor,
    added_TD: Tensor | None,
    norm_D: Tensor,
    proj_1D: Tensor,
    out_norm_D: Tensor,
    *,
    eps: float,
    out_eps: float,
) -> tuple[Tensor, Tensor]:
    """As the running sum, which is the sum itself when nothing is added."""
    x_TD = prefix_TD.new_empty(prefix_TD.shape)
    return x_TD, prefix_TD if added_TD is None else prefix_TD.new_empty(prefix_TD.shape)


def restore(tensors: Sequence[Tensor], values: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """The result of a graph's node, which does not return an argument."""
    return tensors[0], values["prefix_TD"] if values["added_TD"] is None else tensors[1]
