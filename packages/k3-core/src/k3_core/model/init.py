"""Initial values of every parameter, by name (report 1.1, 3.1; the rest is our own choice).

| parameter | law | source |
|---|---|---|
| matrices, embedding, head, position grid | normal(0, initializer_range) | configuration |
| norm weights | 1 | report 3, 4 |
| A_log | 0 | report 1.1 |
| dt_bias | inverse softplus of dt, dt log-uniform in [1e-3, 1e-1], at least 1e-4 | report 1.1 |
| pseudo-queries `*_res_proj` | 0 | report 3.1 |
| e_score_correction_bias | 0 | report 4.2 |
| convolution taps | uniform(-1/sqrt(W), 1/sqrt(W)) | own choice, torch's Conv1d law |
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

DT_RANGE = (1e-3, 1e-1)
DT_FLOOR = 1e-4


def init_law(name: str) -> str:
    """The law of a parameter: normal, ones, zeros, dt_bias or conv."""
    if name.endswith((".A_log", "_res_proj.weight", ".e_score_correction_bias")):
        return "zeros"
    if name.endswith(".dt_bias"):
        return "dt_bias"
    if name.endswith("_conv1d.weight"):
        return "conv"
    is_norm = name.endswith(("norm.weight", "norm0.weight", "norm1.weight"))
    return "ones" if is_norm else "normal"


@torch.no_grad()
def init_parameters(model: nn.Module, std: float, generator: torch.Generator | None = None) -> None:
    """Fill every parameter of `model` by its law, in place; meta tensors are left alone."""
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:
            _fill(parameter, init_law(name), std, generator)


def _fill(tensor: Tensor, law: str, std: float, generator: torch.Generator | None) -> None:
    if law == "zeros":
        tensor.zero_()
    elif law == "ones":
        tensor.fill_(1.0)
    elif law == "conv":
        bound = tensor.shape[-1] ** -0.5
        tensor.copy_(_uniform(tensor, generator).mul_(2 * bound).sub_(bound))
    elif law == "dt_bias":
        low, high = (math.log(edge) for edge in DT_RANGE)
        dt = (_uniform(tensor, generator) * (high - low) + low).exp().clamp_(min=DT_FLOOR)
        tensor.copy_(dt + torch.log(-torch.expm1(-dt)))
    else:
        # Drawn on the host in float32, so that a seed means the same model on every device.
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * std)


def _uniform(tensor: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.rand(tensor.shape, generator=generator)
