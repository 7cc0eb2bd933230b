"""situ_glu in place, for inference on a CPU: the caps' factors come last, as one.

Inputs of 16-bit dtypes and calls that need gradients are the reference's.
"""

import torch
from torch import Tensor

from k3_core.ops.math import math_dtype
from k3_core.ops.situ_glu import reference
from k3_kernels.launch import needs_grad


def situ_glu(gate: Tensor, up: Tensor, *, beta: float, linear_beta: float | None) -> Tensor:
    """beta tanh(gate/beta) sigmoid(gate) * linear_beta tanh(up/linear_beta); as the reference."""
    is_plain = gate.dtype == up.dtype == math_dtype(gate) and gate.shape == up.shape
    if not is_plain or needs_grad(gate, up):
        return reference.situ_glu(gate, up, beta=beta, linear_beta=linear_beta)
    product = (gate / beta).tanh_().mul_(torch.sigmoid(gate))
    if linear_beta is None:
        return product.mul_(up).mul_(beta)
    return product.mul_((up / linear_beta).tanh_()).mul_(beta * linear_beta)
