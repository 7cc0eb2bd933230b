"""Reference of gated_rms_norm: norm first, then the sigmoid gate, both in float32.

T tokens, H heads, V value dim.
"""

import torch
from torch import Tensor

from k3_core.ops.math import math_dtype, rms_scale


def gated_rms_norm(x_THV: Tensor, weight_V: Tensor, gate_THV: Tensor, *, eps: float) -> Tensor:
    """RMSNorm over V with a weight shared by the heads, times sigmoid(gate).

    Returns [T, H, V] in the dtype of `gate`, which is the activation dtype.
    """
    if x_THV.shape != gate_THV.shape or weight_V.shape != x_THV.shape[-1:]:
        raise ValueError(
            f"gated_rms_norm: x {tuple(x_THV.shape)}, gate {tuple(gate_THV.shape)} and weight "
            f"{tuple(weight_V.shape)} do not fit; x and gate are [T, H, V], weight is [V]"
        )
    dtype = math_dtype(x_THV)
    x = x_THV.to(dtype)
    y = x * rms_scale(x, eps) * weight_V.to(dtype)
    return (y * torch.sigmoid(gate_THV.to(dtype))).to(gate_THV.dtype)
