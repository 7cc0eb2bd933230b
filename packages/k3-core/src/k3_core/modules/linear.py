"""Bias-free linear layer whose weight is allocated, not initialised (architecture 2.1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from k3_core.ops.linear.reference import linear

if TYPE_CHECKING:
    from k3_core.ops import OpSet


class Linear(nn.Module):
    """y = x W^T with W [out, in], by the op `linear`; without `ops` it runs the reference.

    `k3_core.model.init` fills the weight.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        ops: OpSet | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.ops = ops
        self.weight = nn.Parameter(
            torch.empty(out_features, in_features, device=device, dtype=dtype)
        )

    @property
    def product(self) -> Callable[..., Tensor]:
        """The op, or its reference."""
        return linear if self.ops is None else self.ops.linear

    def forward(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """[..., in] -> [..., out], in `dtype` if one is given."""
        return self.product(x, self.weight, dtype=dtype)

    def add_to(self, y_TO: Tensor, x_TI: Tensor) -> Tensor:
        """y + forward(x), [T, out]; without gradients the sum may be made in `y`."""
        return self.product(x_TI, self.weight, add_to=y_TO)

    def extra_repr(self) -> str:
        """The shape, for printing a model."""
        return f"{self.weight.shape[1]} -> {self.weight.shape[0]}"
