"""The router: sigmoid scores, a balancing bias that serves the choice only, replayed routes.

Report 4, architecture 3.5. T tokens, D model width, E experts, k routes, B bins.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from k3_core.config import TextConfig
from k3_core.ops import OpSet
from k3_core.ops.route_topk import Routes
from k3_core.ops.route_topk.reference import route_weights
from k3_core.recompute import first_pass, is_recompute


class Router(nn.Module):
    """`gate.weight` [E, D] and `gate.e_score_correction_bias` [E] (never trained by gradient)."""

    def __init__(
        self,
        config: TextConfig,
        ops: OpSet,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config, self.ops = config, ops
        num_experts = config.num_experts
        self.weight = nn.Parameter(
            torch.empty(num_experts, config.hidden_size, device=device, dtype=dtype)
        )
        self.e_score_correction_bias = nn.Parameter(
            torch.empty(num_experts, device=device), requires_grad=False
        )
        self.observer: Callable[[Routes, Tensor | None], None] | None = None
        """Called with the routes of every training forward pass and a mask [T] of the tokens that
        count (None: all); load balancers set it."""
        self.histogram_EB: Tensor | None = None
        """int32; a load balancer's, to which the op adds what a training forward pass requires."""
        self.auxiliary: Callable[[Routes, Tensor | None], Routes] | None = None
        """Given the routes and the mask of every training forward pass, of recomputations too, it
        returns the routes with a gradient of its own; balancers that add a loss set it."""

    def forward(
        self,
        logits_TE: Tensor,
        replay: Tensor | tuple[Tensor, Tensor] | None = None,
        is_counted_T: Tensor | None = None,
    ) -> Routes:
        """Routes of float32 logits [T, E]; `replay` gives indices [T, k], perhaps weights, instead.

        The logits of `weight` come with the latent, from the op `latent_router`. Load balancers see
        what a training pass chose, of the tokens of the mask, and no recomputation of it.
        """
        is_seen = self.training and replay is None and not is_recompute()
        has_balancer = self.observer is not None or self.histogram_EB is not None
        counting: dict[str, Tensor | None] = {}
        is_first_T = is_counted_T
        if is_seen and has_balancer:
            is_first_T = first_pass(is_counted_T, logits_TE)
            if self.histogram_EB is not None:
                counting = {"histogram_EB": self.histogram_EB, "is_counted_T": is_first_T}
        routes = self.ops.route_topk(
            logits_TE,
            self.e_score_correction_bias,
            top_k=self.config.num_experts_per_token,
            renormalize=self.config.moe_renormalize,
            scaling_factor=self.config.routed_scaling_factor,
            num_groups=self.config.num_expert_group,
            topk_groups=self.config.topk_group,
            activation=self.config.moe_router_activation_func,
            **counting,
        )
        if replay is not None:
            return self._replayed(routes, replay)
        if is_seen and self.observer is not None:
            self.observer(routes, is_first_T)
        if self.training and self.auxiliary is not None:
            routes = self.auxiliary(routes, is_counted_T)
        return routes

    def _replayed(self, routes: Routes, replay: Tensor | tuple[Tensor, Tensor]) -> Routes:
        idx_Tk, weight_Tk = replay if isinstance(replay, tuple) else (replay, None)
        num_experts = routes.scores_TE.shape[-1]
        if idx_Tk.shape != routes.idx_Tk.shape:
            raise ValueError(
                f"replayed routes are {tuple(idx_Tk.shape)}, the batch needs "
                f"{tuple(routes.idx_Tk.shape)}"
            )
        if idx_Tk.is_floating_point():
            raise ValueError(f"replayed routes are {idx_Tk.dtype}; give integer expert indices")
        if idx_Tk.numel() and not 0 <= int(idx_Tk.min()) <= int(idx_Tk.max()) < num_experts:
            raise ValueError(f"replayed routes name experts outside 0..{num_experts - 1}")
        idx_Tk = idx_Tk.to(torch.int64)
        if weight_Tk is None:
            weight_Tk = route_weights(
                routes.scores_TE,
                idx_Tk,
                self.config.moe_renormalize,
                self.config.routed_scaling_factor,
            )
        return routes._replace(idx_Tk=idx_Tk, weight_Tk=weight_Tk)
