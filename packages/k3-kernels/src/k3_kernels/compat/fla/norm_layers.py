"""fla's norm layers: parameters `weight` and `bias` (None where there is none) and one call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from k3_kernels.compat.fla import norm


class Affine(nn.Module):
    """weight of ones and bias of zeros over the last dim."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    is_rms_norm = False
    num_groups = 1

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        bias: bool = False,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.elementwise_affine = elementwise_affine
        self.eps = eps
        ones = torch.ones(hidden_size, device=device, dtype=dtype)
        weight = nn.Parameter(ones) if elementwise_affine else None
        has_bias = elementwise_affine and bias
        self.register_parameter("weight", weight)
        self.register_parameter("bias", nn.Parameter(torch.zeros_like(ones)) if has_bias else None)

    def reset_parameters(self) -> None:
        """Back to ones and zeros."""
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        """Size and epsilon."""
        return f"{self.hidden_size}, eps={self.eps}"


class _Norm(Affine):
    """`norm.group_norm` on the parameters."""

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Any:
        """Normalise x + residual."""
        return norm.group_norm(
            x,
            self.weight,
            self.bias,
            residual,
            self.eps,
            prenorm,
            residual_in_fp32,
            self.is_rms_norm,
            self.num_groups,
        )


class LayerNorm(_Norm):
    """`norm.layer_norm`."""


class RMSNorm(_Norm):
    """`norm.rms_norm`."""

    is_rms_norm = True


class _Grouped(Affine):
    """A norm over `num_groups` parts of the last dim."""

    def __init__(
        self,
        num_groups: int,
        hidden_size: int,
        elementwise_affine: bool = True,
        bias: bool = False,
        eps: float = 1e-5,
        is_rms_norm: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, elementwise_affine, bias, eps, device, dtype)
        if hidden_size % num_groups:
            raise ValueError(f"num_groups {num_groups} does not divide the {hidden_size} channels")
        self.num_groups = num_groups
        self.is_rms_norm = is_rms_norm

    def extra_repr(self) -> str:
        """Groups, size and epsilon."""
        return f"{self.num_groups}, {super().extra_repr()}, is_rms_norm={self.is_rms_norm}"


class GroupNorm(_Grouped, _Norm):
    """`norm.group_norm`."""


class GroupNormRef(GroupNorm):
    """The same by torch's own group_norm where there is a mean to subtract: for comparisons."""

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Any:
        """Normalise x + residual in float64."""
        total = x.double() if residual is None else x.double() + residual.double()
        grouped = total.reshape(-1, self.num_groups, self.hidden_size // self.num_groups)
        if not self.is_rms_norm:
            grouped = grouped - grouped.mean(-1, keepdim=True)
        y = nn.functional.rms_norm(grouped, grouped.shape[-1:], eps=self.eps).view(x.shape)
        y = y if self.weight is None else y * self.weight
        y = y if self.bias is None else y + self.bias
        return (y.to(x.dtype), total.to(x.dtype)) if prenorm else y.to(x.dtype)


class _NormLinear(Affine):
    """`norm.group_norm_linear` on the parameters; the linear weight is an argument."""

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Any:
        """Normalise x + residual, then `weight` and `bias`."""
        return norm.group_norm_linear(
            x,
            self.weight,
            self.bias,
            weight,
            bias,
            residual,
            self.eps,
            prenorm,
            residual_in_fp32,
            self.is_rms_norm,
            self.num_groups,
        )


class LayerNormLinear(_NormLinear):
    """`norm.layer_norm_linear`."""


class RMSNormLinear(_NormLinear):
    """`norm.rms_norm_linear`."""

    is_rms_norm = True


class GroupNormLinear(_Grouped, _NormLinear):
    """`norm.group_norm_linear`."""
