"""situ_glu with tanh(x) = 2 sigmoid(2x) - 1; the signature is that of k3_core.ops.situ_glu."""

import torch
from torch import Tensor


def situ_glu(gate: Tensor, up: Tensor, *, beta: float, linear_beta: float | None) -> Tensor:
    """The capped gated activation, in float32 (float64 for float64), in the dtype of `gate`."""
    dtype = torch.float64 if gate.dtype == torch.float64 else torch.float32
    g, u = gate.to(dtype), up.to(dtype)
    if linear_beta is not None:
        u = _cap(u, linear_beta)
    return (_cap(g, beta) * torch.sigmoid(g) * u).to(gate.dtype)


def _cap(x: Tensor, bound: float) -> Tensor:
    """bound * tanh(x / bound)."""
    return bound * (2.0 * torch.sigmoid(2.0 * x / bound) - 1.0)
