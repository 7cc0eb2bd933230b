"""What the decoder asks of a feed-forward, and the activation that all of them share."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from k3_core.config import TextConfig
from k3_core.model.batch import SequenceBatch
from k3_core.ops import OpSet
from k3_core.ops.route_topk import Routes

Activation = Callable[[Tensor, Tensor], Tensor]


class FeedForward(Protocol):
    """An nn.Module; its parameters carry the released names below its attribute."""

    attribute: ClassVar[str]
    """Its name in a decoder layer: `mlp` or `block_sparse_moe` in the released layout."""

    def __init__(
        self,
        config: TextConfig,
        layer: int,
        ops: OpSet,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None: ...

    def __call__(self, x_TD: Tensor, batch: SequenceBatch) -> tuple[Tensor, Routes | None]:
        """Normed layer input [T, D] -> output [T, D] and, with experts, the routes taken."""
        ...


def glu(config: TextConfig, ops: OpSet) -> Activation:
    """The configured gated activation: SiTU-GLU, or SiLU(gate) * up without caps.

    SiTU-GLU is a `partial` with its settings as keywords: so a kernel of the experts can tell
    which function it is and compute it between its own products.
    """
    if config.hidden_act == "silu":
        return silu_glu
    beta, linear_beta = config.situ_beta, config.situ_linear_beta
    return partial(ops.situ_glu, beta=beta, linear_beta=linear_beta)


def silu_glu(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU(gate) * up."""
    return F.silu(gate) * up
