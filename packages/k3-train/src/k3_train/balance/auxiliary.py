"""The auxiliary loss of Switch Transformer (arXiv 2101.03961), a baseline without biases.

T tokens, E experts, k routes a token. f_e is the share of the routes that expert e got, P_e the
mean of its score divided by the token's sum of scores. E sum_e f_e P_e is 1 at perfect balance.
Only P has a gradient. f is that of a micro-batch, so this loss depends on how a step is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from k3_core.ops.route_topk import Routes
from k3_train.balance.load import add_loads
from k3_train.balance.none import NoBalancer
from k3_train.config import BalanceSection


class AuxiliaryBalancer(NoBalancer):
    """Adds the gradient of `balance.auxiliary_weight` times the loss of every router.

    The reported loss does not contain it. share: what the loss of the micro-batch weighs in that of
    the step; the stepper fills it in.
    """

    def __init__(self, biases: Sequence[Tensor], *, top_k: int, settings: BalanceSection) -> None:
        super().__init__(biases, top_k=top_k, settings=settings)
        self.weight = settings.auxiliary_weight
        self.share = torch.ones((), device=biases[0].device if biases else "cpu")

    def auxiliary(self, routes: Routes, is_counted_T: Tensor | None) -> Routes:
        """The routes, whose weights carry the gradient of the loss of one router back.

        It is part of the graph, so a pass that recomputes activations repeats it and adds nothing.
        """
        loss = self.weight * self.share * switch_loss(routes, is_counted_T)
        return routes._replace(weight_Tk=_CarryLoss.apply(routes.weight_Tk, loss))


def switch_loss(routes: Routes, is_counted_T: Tensor | None = None) -> Tensor:
    """E sum_e f_e P_e of the tokens that count; 0 when there are none."""
    scores_TE = routes.scores_TE
    num_experts = scores_TE.shape[-1]
    counts_E = torch.zeros(num_experts, dtype=torch.int64, device=scores_TE.device)
    add_loads(counts_E, routes, is_counted_T)
    share_TE = scores_TE / (scores_TE.sum(-1, keepdim=True) + 1e-20)
    if is_counted_T is not None:
        share_TE = share_TE * is_counted_T[:, None]
    num_routes = counts_E.sum().clamp(min=1)
    num_tokens = num_routes / routes.idx_Tk.shape[-1]
    return num_experts * (counts_E / num_routes * share_TE.sum(0) / num_tokens).sum()


class _CarryLoss(torch.autograd.Function):
    """Returns its first argument; in the backward the second, a loss, gets the gradient one."""

    @staticmethod
    def forward(ctx: Any, weight_Tk: Tensor, loss: Tensor) -> Tensor:
        return weight_Tk.view_as(weight_Tk)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], torch.ones((), dtype=grads[0].dtype, device=grads[0].device)
