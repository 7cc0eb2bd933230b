"""fla.modules.layernorm: layer, RMS and group norm, with a residual and a linear layer after them.

Plain torch in float32 (float64 for float64), differentiable. `residual` is added first; `prenorm`
also returns the sum, in the residual's dtype (float32 with `residual_in_fp32`, else x's).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from k3_core.ops.math import math_dtype, rms_scale


def normalize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    residual_in_fp32: bool,
    *,
    is_rms_norm: bool,
    num_groups: int = 1,
) -> tuple[Tensor, Tensor]:
    """The normalised sum in the math dtype, and the sum in its own dtype."""
    if x.shape[-1] % num_groups:
        raise ValueError(f"num_groups {num_groups} does not divide the {x.shape[-1]} channels")
    total = x.to(math_dtype(x))
    sum_dtype = torch.float32 if residual_in_fp32 else x.dtype
    if residual is not None:
        total, sum_dtype = total + residual.to(total.dtype), residual.dtype
    grouped = total.unflatten(-1, (num_groups, -1))
    if not is_rms_norm:
        grouped = grouped - grouped.mean(-1, keepdim=True)
    y = (grouped * rms_scale(grouped, eps)).flatten(-2)
    if weight is not None:
        y = y * weight.to(y.dtype)
    if bias is not None:
        y = y + bias.to(y.dtype)
    return y, total.to(sum_dtype)


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """LayerNorm over the last dim, or RMSNorm."""
    return group_norm(x, weight, bias, residual, eps, prenorm, residual_in_fp32, is_rms_norm)


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """RMSNorm over the last dim."""
    return group_norm(x, weight, bias, residual, eps, prenorm, residual_in_fp32, True)


def group_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
    num_groups: int = 1,
) -> Tensor | tuple[Tensor, Tensor]:
    """Norm over each of `num_groups` equal parts of the last dim, in x's dtype."""
    y, total = normalize(
        x,
        weight,
        bias,
        residual,
        eps,
        residual_in_fp32,
        is_rms_norm=is_rms_norm,
        num_groups=num_groups,
    )
    return (y.to(x.dtype), total) if prenorm else y.to(x.dtype)


def layer_norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
    num_groups: int = 1,
) -> Tensor | tuple[Tensor, Tensor]:
    """A norm and `linear_weight` `[O, D]` after it."""
    y, total = normalize(
        x,
        norm_weight,
        norm_bias,
        residual,
        eps,
        residual_in_fp32,
        is_rms_norm=is_rms_norm,
        num_groups=num_groups,
    )
    out = F.linear(y.to(linear_weight.dtype), linear_weight, linear_bias)
    return (out, total) if prenorm else out


group_norm_linear = layer_norm_linear


def rms_norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """RMSNorm and a linear layer after it."""
    return layer_norm_linear(
        x,
        norm_weight,
        norm_bias,
        linear_weight,
        linear_bias,
        residual,
        eps,
        prenorm,
        residual_in_fp32,
        is_rms_norm=True,
    )
