"""Reference of situ_glu, and of the uncapped SiLU-GLU that the configuration also accepts."""

import torch
from torch import Tensor

from k3_core.ops.math import math_dtype


def situ_glu(gate: Tensor, up: Tensor, *, beta: float, linear_beta: float | None) -> Tensor:
    """beta tanh(gate/beta) sigmoid(gate) * linear_beta tanh(up/linear_beta), same shape and dtype.

    `linear_beta=None` leaves the up branch uncapped. Computed in float32 (float64 for float64).
    """
    if gate.shape != up.shape:
        raise ValueError(f"situ_glu: gate {tuple(gate.shape)} and up {tuple(up.shape)} differ")
    dtype = math_dtype(gate)
    g, u = gate.to(dtype), up.to(dtype)
    capped_gate = beta * torch.tanh(g / beta) * torch.sigmoid(g)
    capped_up = u if linear_beta is None else linear_beta * torch.tanh(u / linear_beta)
    return (capped_gate * capped_up).to(gate.dtype)
