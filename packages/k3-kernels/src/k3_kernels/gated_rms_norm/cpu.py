"""gated_rms_norm in place, for inference on a CPU. T tokens, H heads, V value dim.

Inputs of mixed or of 16-bit dtypes, and calls that need gradients, are the reference's.
"""

import torch
from torch import Tensor

from k3_core.ops.gated_rms_norm import reference
from k3_core.ops.math import math_dtype
from k3_kernels.launch import needs_grad
from k3_kernels.rms_norm.cpu import normed


def gated_rms_norm(x_THV: Tensor, weight_V: Tensor, gate_THV: Tensor, *, eps: float) -> Tensor:
    """RMSNorm over V with a weight shared by the heads, times sigmoid(gate); as the reference."""
    has_one_dtype = x_THV.dtype == weight_V.dtype == gate_THV.dtype == math_dtype(x_THV)
    fits = x_THV.shape == gate_THV.shape and weight_V.shape == x_THV.shape[-1:]
    if not has_one_dtype or not fits or needs_grad(x_THV, weight_V, gate_THV):
        return reference.gated_rms_norm(x_THV, weight_V, gate_THV, eps=eps)
    return normed(x_THV, eps).mul_(weight_V).mul_(torch.sigmoid(gate_THV))
