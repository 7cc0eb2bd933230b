"""moe_experts on a CPU: rows sorted by expert once, one matmul per expert that was hit."""

import torch
from torch import Tensor
from torch.nn import functional as F

from k3_core.ops.math import math_dtype
from k3_core.ops.moe_experts.reference import Activation, check_routes
from k3_core.ops.moe_experts.weights import ExpertStack, expert_weight


def moe_experts(
    x_TD: Tensor,
    idx_Tk: Tensor,
    weight_Tk: Tensor,
    w1: ExpertStack,
    w3: ExpertStack,
    w2: ExpertStack,
    *,
    activation: Activation,
) -> Tensor:
    """The same function as the reference; no scatter-add, so its sums have a fixed order."""
    check_routes(x_TD, idx_Tk, weight_Tk, w1.shape[0])
    num_routes = idx_Tk.shape[1]
    order, counts = sort_by_expert(idx_Tk, w1.shape[0])
    rows = x_TD[order // num_routes].split(counts.tolist())
    outputs = [
        _expert(x, expert, w1, w3, w2, activation) for expert, x in enumerate(rows) if len(x)
    ]
    if not outputs:
        return x_TD.new_zeros(x_TD.shape[0], w2.shape[1])
    return combine(torch.cat(outputs), order, weight_Tk, x_TD)


def sort_by_expert(idx_Tk: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Flat route positions ordered by expert (stable), and the rows of each expert."""
    flat = idx_Tk.reshape(-1)
    order = torch.argsort(flat, stable=True)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
    return order, counts.scatter_add_(0, flat, torch.ones_like(flat))


def combine(sorted_rows: Tensor, order: Tensor, weight_Tk: Tensor, x_TD: Tensor) -> Tensor:
    """Bring expert outputs back to token order and sum a token's routes in float32."""
    num_tokens, num_routes = weight_Tk.shape
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    y_TkD = sorted_rows[inverse].view(num_tokens, num_routes, -1).to(math_dtype(x_TD))
    return (y_TkD * weight_Tk.to(y_TkD.dtype)[..., None]).sum(1).to(x_TD.dtype)


def _expert(
    x: Tensor, expert: int, w1: ExpertStack, w3: ExpertStack, w2: ExpertStack, act: Activation
) -> Tensor:
    gate = F.linear(x, expert_weight(w1, expert, x.dtype))
    up = F.linear(x, expert_weight(w3, expert, x.dtype))
    return F.linear(act(gate, up), expert_weight(w2, expert, x.dtype))
