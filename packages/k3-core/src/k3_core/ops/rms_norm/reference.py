"""Reference of rms_norm in the released order: normalise in float32, cast, multiply by the weight.

Architecture 3: RMSNorm(x; w, eps) = w * cast(x_f32 * rsqrt(mean(x_f32^2) + eps)).
"""

from torch import Tensor

from k3_core.ops.math import math_dtype, rms_scale


def rms_norm(x: Tensor, weight_D: Tensor, *, eps: float) -> Tensor:
    """[..., D] -> [..., D] in the dtype of `x`; raises ValueError for a weight of another size."""
    if weight_D.shape != x.shape[-1:]:
        raise ValueError(
            f"rms_norm: x {tuple(x.shape)} and weight {tuple(weight_D.shape)} do not fit; x is "
            "[..., D], weight is [D]"
        )
    normed = x.to(math_dtype(x))
    normed = normed * rms_scale(normed, eps)
    return weight_D.to(x.dtype) * normed.to(x.dtype)
