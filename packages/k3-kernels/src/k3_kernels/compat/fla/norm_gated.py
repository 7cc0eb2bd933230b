"""fla.modules.fused_norm_gate: a norm times an activated gate, with a linear layer after it.

The RMS norm with the sigmoid gate is K3's op gated_rms_norm; the rest is plain torch. Residuals
as in `norm`.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from k3_kernels.compat.fla.choose import op_for
from k3_kernels.compat.fla.norm import normalize

ACTIVATIONS = ("swish", "silu", "sigmoid")


def layer_norm_gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str = "swish",
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Tensor | tuple[Tensor, Tensor]:
    """LayerNorm of x `[..., D]` times the gate, in x's dtype."""
    y, total = _gated(x, g, weight, bias, activation, residual, residual_in_fp32, eps, False)
    return (y.to(x.dtype), total) if prenorm else y.to(x.dtype)


def rms_norm_gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str = "swish",
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Tensor | tuple[Tensor, Tensor]:
    """RMSNorm of x `[..., D]` times the gate, in x's dtype."""
    is_op = activation == "sigmoid" and bias is None and residual is None and not prenorm
    if is_op and weight is not None and x.dtype == g.dtype:
        rows = (t.reshape(-1, 1, t.shape[-1]) for t in (x, g))
        x_R1D, g_R1D = rows
        y: Tensor = op_for("gated_rms_norm", x)(x_R1D, weight, g_R1D, eps=eps)
        return y.view(x.shape)
    y, total = _gated(x, g, weight, bias, activation, residual, residual_in_fp32, eps, True)
    return (y.to(x.dtype), total) if prenorm else y.to(x.dtype)


def layer_norm_swish_gate_linear(
    x: Tensor,
    g: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Tensor | tuple[Tensor, Tensor]:
    """LayerNorm times swish(g), then `linear_weight` `[O, D]`."""
    y, total = _gated(x, g, norm_weight, norm_bias, "swish", residual, residual_in_fp32, eps, False)
    out = F.linear(y.to(linear_weight.dtype), linear_weight, linear_bias)
    return (out, total) if prenorm else out


def rms_norm_swish_gate_linear(
    x: Tensor,
    g: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Tensor | tuple[Tensor, Tensor]:
    """RMSNorm times swish(g), then `linear_weight` `[O, D]`."""
    y, total = _gated(x, g, norm_weight, norm_bias, "swish", residual, residual_in_fp32, eps, True)
    out = F.linear(y.to(linear_weight.dtype), linear_weight, linear_bias)
    return (out, total) if prenorm else out


def check_activation(activation: str) -> str:
    """The name itself; ValueError for one that fla does not have."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; use one of {', '.join(ACTIVATIONS)}")
    return activation


def _gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str,
    residual: Tensor | None,
    residual_in_fp32: bool,
    eps: float,
    is_rms_norm: bool,
) -> tuple[Tensor, Tensor]:
    """The gated norm in the math dtype, and the sum that was normalised."""
    y, total = normalize(x, weight, bias, residual, eps, residual_in_fp32, is_rms_norm=is_rms_norm)
    gate = g.to(y.dtype)
    act = F.sigmoid if check_activation(activation) == "sigmoid" else F.silu
    return y * act(gate), total
