"""Reference of mx_quantize in float64 (signature and rules: the package's docstring)."""

from __future__ import annotations

import torch
from torch import Tensor

from k3_core.custom_op import custom_op
from k3_core.quant import BLOCK, MXTensor

BIAS = 127
_LARGEST = 6.0 * 2.0**125
# Midpoints between neighbouring magnitudes. A tie goes to the even code: down at .25, 1.25, 2.5
# and 5; up at the three that are lowered by one step, since `bucketize` sends ties down.
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_TIES_UP = (0.75, 1.75, 3.5)


@custom_op("mx_quantize.reference", is_differentiable=False)
def mx_quantize(w: Tensor, *, block: int = BLOCK) -> MXTensor:
    """Quantise w [..., N] to MXFP4 blocks of 32 along the last dimension."""
    blocks, largest = checked_blocks(w, block, torch.float64)
    exponent = scale_exponent(largest)
    codes = _nearest_codes(torch.ldexp(blocks, -exponent.unsqueeze(-1))).flatten(-2)
    packed = codes[..., 0::2] | codes[..., 1::2] << 4
    return MXTensor(packed, (exponent + BIAS).to(torch.uint8))


def checked_blocks(w: Tensor, block: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The blocks [..., G, 32] of w in `dtype` and the largest magnitude of each [..., G].

    Raises ValueError for what MXFP4 cannot hold.
    """
    if block != BLOCK:
        raise ValueError(f"block = {block} is not accepted, allowed: {BLOCK} (the MXFP4 block)")
    if w.dim() == 0 or w.shape[-1] % BLOCK:
        raise ValueError(
            f"mx_quantize needs a last dimension that is a multiple of {BLOCK}, got the shape "
            f"{tuple(w.shape)}; choose such a width or keep the weight unquantised"
        )
    blocks = w.detach().to(dtype).reshape(*w.shape[:-1], -1, BLOCK)
    largest = blocks.abs().amax(-1)
    if not bool((largest <= _LARGEST).all()):
        raise ValueError(
            f"mx_quantize of a weight {tuple(w.shape)} with NaN, infinite or huge values; "
            f"allowed: finite values up to {_LARGEST:.3g}. Find the layer that diverged"
        )
    return blocks, largest


def scale_exponent(largest: Tensor) -> Tensor:
    """Exponent of the scale of each block [..., G] (int32), at least -127."""
    _, exponent = torch.frexp(largest)  # largest = m * 2**exponent with m in [0.5, 1)
    exponent = torch.where(largest > 0, exponent - 3, -BIAS)
    return exponent.clamp(min=-BIAS)


def _nearest_codes(scaled: Tensor) -> Tensor:
    """E2M1 codes (uint8 0..15) of values in units of their block's scale."""
    points = torch.tensor(_MIDPOINTS, dtype=scaled.dtype, device=scaled.device)
    lowered = torch.nextafter(points, torch.zeros_like(points))
    is_up = torch.tensor([one in _TIES_UP for one in _MIDPOINTS], device=scaled.device)
    magnitude = torch.bucketize(scaled.abs(), torch.where(is_up, lowered, points))
    return (magnitude + 8 * torch.signbit(scaled)).to(torch.uint8)
