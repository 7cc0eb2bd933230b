"""route_topk by Triton. T tokens, E experts, k routes a token."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from k3_core.custom_op import custom_op
from k3_core.ops.route_topk import Routes, reference
from k3_kernels.early import MAX_ROWS, early_launch
from k3_kernels.launch import needs_grad
from k3_kernels.route_topk.kernel import route_topk_kernel


def route_topk(
    logits_TE: Tensor,
    bias_E: Tensor,
    *,
    top_k: int,
    renormalize: bool,
    scaling_factor: float,
    num_groups: int = 1,
    topk_groups: int = 1,
    activation: str = "sigmoid",
) -> Routes:
    """As `route_topk.reference`, with the lowest id first among equal biased scores.

    The reference itself serves several groups and calls that need gradients. A row with NaN
    still gets `top_k` distinct experts of the range; its weights may be NaN, other rows' not.
    """
    num_experts = logits_TE.shape[1]
    is_plain = num_groups == 1 and 1 <= top_k <= num_experts
    is_known = activation in ("sigmoid", "softmax") and logits_TE.dtype == torch.float32
    if not is_plain or not is_known or needs_grad(logits_TE):
        # The reference also raises for values that no implementation takes.
        return reference.route_topk(
            logits_TE,
            bias_E,
            top_k=top_k,
            renormalize=renormalize,
            scaling_factor=scaling_factor,
            num_groups=num_groups,
            topk_groups=topk_groups,
            activation=activation,
        )
    return _route_topk(
        logits_TE,
        bias_E,
        top_k=top_k,
        renormalize=renormalize,
        scaling_factor=scaling_factor,
        activation=activation,
    )


@custom_op("route_topk.triton", is_differentiable=False)
def _route_topk(
    logits_TE: Tensor,
    bias_E: Tensor,
    *,
    top_k: int,
    renormalize: bool,
    scaling_factor: float,
    num_groups: int = 1,
    topk_groups: int = 1,
    activation: str = "sigmoid",
) -> Routes:
    num_tokens, num_experts = logits_TE.shape
    if logits_TE.stride(1) != 1:
        logits_TE = logits_TE.contiguous()
    device = logits_TE.device
    routes = Routes(
        torch.empty(num_tokens, top_k, dtype=torch.int64, device=device),
        torch.empty(num_tokens, top_k, dtype=torch.float32, device=device),
        torch.empty(num_tokens, num_experts, dtype=torch.float32, device=device),
        torch.empty(num_tokens, dtype=torch.float32, device=device),
    )
    if not num_tokens:
        return routes
    route_topk_kernel[(num_tokens,)](
        logits_TE,
        bias_E.detach().contiguous(),
        *routes,
        logits_TE.stride(0),
        float(scaling_factor),
        E=num_experts,
        K=top_k,
        RENORMALIZE=renormalize,
        IS_SOFTMAX=activation == "softmax",
        J=triton.next_power_of_2(triton.cdiv(num_experts, 128)),
        KPAD=triton.next_power_of_2(top_k + 1),
        IS_WHOLE=num_tokens <= MAX_ROWS,
        **early_launch(num_tokens, device),
        num_warps=1,
    )
    return routes
