"""The dense MLP: the first layers' feed-forward and the shared experts (architecture 3.1)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from k3_core.config import TextConfig
from k3_core.model.batch import SequenceBatch
from k3_core.modules import Linear, Projections
from k3_core.moe.base import glu
from k3_core.ops import OpSet


class GatedMLP(nn.Module):
    """down(f(gate(x), up(x))) with the configured gated activation."""

    def __init__(
        self,
        config: TextConfig,
        width: int,
        ops: OpSet,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        like: dict[str, Any] = {"device": device, "dtype": dtype}
        self.config, self.ops = config, ops
        self.gate_proj = Linear(config.hidden_size, width, ops, **like)
        self.up_proj = Linear(config.hidden_size, width, ops, **like)
        self.down_proj = Linear(width, config.hidden_size, ops, **like)
        self._read_input = Projections(self, ("gate_proj",), ("up_proj",))

    def forward(self, x_TD: Tensor) -> Tensor:
        """[T, D] -> [T, D]."""
        activation = glu(self.config, self.ops)
        return self.down_proj(activation(*self._read_input(x_TD)))


class DenseFeedForward(GatedMLP):
    """The dense MLP as a decoder layer's feed-forward."""

    attribute = "mlp"

    def __init__(
        self,
        config: TextConfig,
        layer: int,
        ops: OpSet,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(config, config.intermediate_size, ops, device=device, dtype=dtype)

    def forward(self, x_TD: Tensor, batch: SequenceBatch) -> tuple[Tensor, None]:  # type: ignore[override]
        """[T, D] -> [T, D]; there are no routes."""
        return super().forward(x_TD), None
