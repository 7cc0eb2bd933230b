"""Stable LatentMoE (report 4, architecture 3.5).

The routed experts work in a latent space narrower than the model; router and shared experts see
the un-projected input. Without `routed_expert_hidden_size` the experts are full-width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from k3_core.config import TextConfig
from k3_core.model.batch import SequenceBatch
from k3_core.modules import Linear, RMSNorm, beside
from k3_core.moe.base import glu
from k3_core.moe.dense import GatedMLP
from k3_core.moe.experts import ExpertBank
from k3_core.moe.router import Router
from k3_core.ops import OpSet
from k3_core.ops.latent_router.reference import router_logits
from k3_core.ops.route_topk import Routes


class LatentMoE(nn.Module):
    """y = Shared(x) + W_up RMSNorm(sum_e w_e Expert_e(W_down x))."""

    attribute = "block_sparse_moe"

    def __init__(
        self,
        config: TextConfig,
        layer: int,
        ops: OpSet,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        like: dict[str, Any] = {"device": device, "dtype": dtype}
        self.config, self.layer, self.ops = config, layer, ops
        model, latent = config.hidden_size, config.expert_hidden_size
        self.gate = Router(config, ops, **like)
        self.has_latent = config.is_latent_moe
        if self.has_latent:
            self.routed_expert_down_proj = Linear(model, latent, ops, **like)
            self.routed_expert_up_proj = Linear(latent, model, ops, **like)
            if config.latent_moe_use_norm:
                self.routed_expert_norm = RMSNorm(latent, config.rms_norm_eps, ops, **like)
        self.experts = ExpertBank(config.num_experts, latent, config.moe_intermediate_size, **like)
        self.shared_experts = GatedMLP(config, config.shared_intermediate_size, ops, **like)

    def forward(self, x_TD: Tensor, batch: SequenceBatch) -> tuple[Tensor, Routes]:
        """[T, D] -> [T, D] and the routes taken."""
        shared = beside(lambda: self.shared_experts(x_TD), x_TD.device)
        z_TL, logits_TE = self._latent_and_logits(x_TD)
        routes = self.gate(logits_TE, batch.routes.get(self.layer), batch.is_counted_T)
        norm = None
        if self.has_latent and self.config.latent_moe_use_norm:
            norm = self.routed_expert_norm.weight, self.routed_expert_norm.eps
        u_TL = self.ops.moe_experts(
            z_TL,
            routes.idx_Tk,
            routes.weight_Tk,
            *self.experts.stacks(),
            activation=glu(self.config, self.ops),
            norm=norm,
        )
        if not self.has_latent:
            return u_TL + shared(), routes
        return self.routed_expert_up_proj.add_to(shared(), u_TL), routes

    def _latent_and_logits(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        if not self.has_latent:
            return x_TD, router_logits(x_TD, self.gate.weight)
        down_LD = self.routed_expert_down_proj.weight
        return self.ops.latent_router(x_TD, down_LD, self.gate.weight)
