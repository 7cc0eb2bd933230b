"""Reference of moe_experts: one expert at a time, float64-capable.

T tokens, D input and output width, I expert width, E experts, k routes a token. Weights are
[E, out, in] stacks: w1 (gate) and w3 (up) [E, I, D], w2 (down) [E, D, I]; each may be packed
(`k3_core.quant.MXTensor`), then only the experts that were hit are dequantised.

For training with quantised experts (report 8.7) the inputs of all products are rounded as MX
formats hold them: plain stacks to MXFP4 with `quantize_weights`, x and the hidden activation to
MXFP8 with `quantize_activations`. Their gradients pass unchanged.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from k3_core.custom_op import custom_op
from k3_core.ops.math import math_dtype
from k3_core.ops.moe_experts.weights import ExpertStack, as_mxfp4, expert_weights
from k3_core.ops.rms_norm.reference import rms_norm
from k3_core.quant import fake_mxfp8

Activation = Callable[[Tensor, Tensor], Tensor]
Norm = tuple[Tensor, float]
"""Weight [D] and eps of an RMSNorm."""


@custom_op("moe_experts.reference")
def moe_experts(
    x_TD: Tensor,
    idx_Tk: Tensor,
    weight_Tk: Tensor,
    w1: ExpertStack,
    w3: ExpertStack,
    w2: ExpertStack,
    *,
    activation: Activation,
    norm: Norm | None = None,
    quantize_weights: bool = False,
    quantize_activations: bool = False,
) -> Tensor:
    """Sum over k of weight * w2(activation(w1 x, w3 x)), summed in float32, in the dtype of x.

    With `norm`, the RMSNorm of that.
    """
    check_routes(x_TD, idx_Tk, weight_Tk, w1.shape[0])
    dtype = math_dtype(x_TD)
    if quantize_weights:
        w1, w3, w2 = as_mxfp4(w1, w3, w2)
    if quantize_activations:
        x_TD = fake_mxfp8(x_TD)
    out_TD = torch.zeros(x_TD.shape[0], w2.shape[1], dtype=dtype, device=x_TD.device)
    for expert in range(w1.shape[0]):
        token, route = torch.where(idx_Tk == expert)
        if token.numel() == 0:
            continue
        x = x_TD[token]
        gate, up, down = (next(expert_weights(w, [expert], x.dtype)) for w in (w1, w3, w2))
        hidden = activation(F.linear(x, gate), F.linear(x, up))
        hidden = fake_mxfp8(hidden) if quantize_activations else hidden
        y = F.linear(hidden, down).to(dtype)
        out_TD = out_TD.index_add(0, token, y * weight_Tk[token, route].to(dtype)[:, None])
    out_TD = out_TD.to(x_TD.dtype)
    return out_TD if norm is None else rms_norm(out_TD, norm[0], eps=norm[1])


def check_routes(x_TD: Tensor, idx_Tk: Tensor, weight_Tk: Tensor, num_experts: int) -> None:
    """Raise ValueError when routes do not fit the tokens, or name an expert that is not there."""
    if idx_Tk.shape != weight_Tk.shape or idx_Tk.shape[0] != x_TD.shape[0]:
        raise ValueError(
            f"moe_experts: idx {tuple(idx_Tk.shape)} and weight {tuple(weight_Tk.shape)} must be "
            f"[T, k] for x {tuple(x_TD.shape)}"
        )
    # On a GPU the look at the values would cost a sync.
    if idx_Tk.device.type != "cpu" or not idx_Tk.numel():
        return
    low, high = (int(bound) for bound in idx_Tk.aminmax())
    if low < 0 or high >= num_experts:
        raise ValueError(
            f"moe_experts: expert indices are in {low}..{high}, allowed are 0..{num_experts - 1}"
        )
