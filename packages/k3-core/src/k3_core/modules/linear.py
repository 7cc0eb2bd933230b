"""Bias-free linear layer whose weight is allocated, not initialised (architecture 2.1)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Linear(nn.Module):
    """y = x W^T with W [out, in]. `k3_core.model.init` fills the weight."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(out_features, in_features, device=device, dtype=dtype)
        )

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return F.linear(x, self.weight)

    def add_to(self, y_TO: Tensor, x_TI: Tensor) -> Tensor:
        """y + forward(x), [T, out]; without gradients the sum is made in `y`, in the product."""
        if torch.is_grad_enabled() or not y_TO.dtype == x_TI.dtype == self.weight.dtype:
            return y_TO + self(x_TI)
        return y_TO.addmm_(x_TI, self.weight.t())

    def extra_repr(self) -> str:
        """The shape, for printing a model."""
        return f"{self.weight.shape[1]} -> {self.weight.shape[0]}"
