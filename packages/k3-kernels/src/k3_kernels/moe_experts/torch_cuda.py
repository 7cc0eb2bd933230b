"""moe_experts on CUDA through torch's grouped matrix product, without a host sync.

The grouped product wants bfloat16: inputs are cast to it, as autocast would do.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from k3_core.ops.moe_experts.reference import Activation, Norm, check_routes
from k3_core.ops.moe_experts.weights import ExpertStack, as_mxfp4
from k3_core.ops.rms_norm.reference import rms_norm
from k3_core.quant import MXTensor, fake_mxfp8
from k3_kernels.moe_experts.cpu import combine, sort_by_expert, with_mxfp8


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
    """The same function as the reference, in bfloat16 with float32 sums over the routes."""
    check_routes(x_TD, idx_Tk, weight_Tk, w1.shape[0])
    if quantize_weights:
        w1, w3, w2 = as_mxfp4(w1, w3, w2)
    if quantize_activations:
        x_TD, activation = fake_mxfp8(x_TD), with_mxfp8(activation)
    order, counts = sort_by_expert(idx_Tk, w1.shape[0])
    ends = counts.cumsum(0).to(torch.int32)
    rows = x_TD[order // idx_Tk.shape[1]].to(torch.bfloat16)
    gate = _grouped(rows, w1, ends)
    up = _grouped(rows, w3, ends)
    out_TD = combine(_grouped(activation(gate, up), w2, ends), order, weight_Tk, x_TD)
    return out_TD if norm is None else rms_norm(out_TD, norm[0], eps=norm[1])


def _grouped(rows: Tensor, stack: ExpertStack, ends: Tensor) -> Tensor:
    if isinstance(stack, MXTensor):
        stack = stack.dequantize(torch.bfloat16)
    return F.grouped_mm(rows, stack.to(torch.bfloat16).mT, offs=ends)
