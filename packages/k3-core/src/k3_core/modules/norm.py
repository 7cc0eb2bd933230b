"""RMSNorm with a learned weight, by the op `rms_norm` (architecture 3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from k3_core.ops.rms_norm.reference import rms_norm

if TYPE_CHECKING:
    from k3_core.ops import OpSet


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis; without `ops` it runs the reference."""

    def __init__(
        self,
        size: int,
        eps: float,
        ops: OpSet | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps, self.ops = eps, ops
        self.weight = nn.Parameter(torch.empty(size, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size] in the dtype of `x`."""
        norm = rms_norm if self.ops is None else self.ops.rms_norm
        y: Tensor = norm(x, self.weight, eps=self.eps)
        return y

    def extra_repr(self) -> str:
        """Size and epsilon, for printing a model."""
        return f"{self.weight.shape[0]}, eps={self.eps}"
