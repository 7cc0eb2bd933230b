"""fla's gated norm layers on `norm_gated`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from k3_kernels.compat.fla import norm_gated
from k3_kernels.compat.fla.norm_layers import Affine


class _Gated(Affine):
    """A norm times an activated gate."""

    function: Any
    activation: str

    def forward(
        self,
        x: Tensor,
        g: Tensor,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Any:
        """Normalise x + residual, then gate by g."""
        return self.function(
            x,
            g,
            self.weight,
            self.bias,
            self.activation,
            residual,
            prenorm,
            residual_in_fp32,
            self.eps,
        )


class FusedLayerNormGated(_Gated):
    """LayerNorm times an activated gate."""

    function = staticmethod(norm_gated.layer_norm_gated)

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        bias: bool = False,
        activation: str = "swish",
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, elementwise_affine, bias, eps, device, dtype)
        self.activation = norm_gated.check_activation(activation)


class FusedRMSNormGated(_Gated):
    """RMSNorm times an activated gate."""

    function = staticmethod(norm_gated.rms_norm_gated)

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        eps: float = 1e-5,
        activation: str = "swish",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, elementwise_affine, False, eps, device, dtype)
        self.activation = norm_gated.check_activation(activation)


class _SwishGateLinear(Affine):
    """A norm times swish(g) with a linear layer after it, whose weight is an argument."""

    function: Any

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, elementwise_affine, False, eps, device, dtype)

    def forward(
        self,
        x: Tensor,
        g: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Any:
        """Normalise x + residual, gate by swish(g), then `weight` and `bias`."""
        return self.function(
            x,
            g,
            self.weight,
            self.bias,
            weight,
            bias,
            residual,
            prenorm,
            residual_in_fp32,
            self.eps,
        )


class FusedLayerNormSwishGateLinear(_SwishGateLinear):
    """`norm_gated.layer_norm_swish_gate_linear`."""

    function = staticmethod(norm_gated.layer_norm_swish_gate_linear)


class FusedRMSNormSwishGateLinear(_SwishGateLinear):
    """`norm_gated.rms_norm_swish_gate_linear`."""

    function = staticmethod(norm_gated.rms_norm_swish_gate_linear)


FusedLayerNormSwishGate = FusedLayerNormGated
FusedRMSNormSwishGate = FusedRMSNormGated
