"""mx_quantize in float32, where scaling by a power of two is exact and codes are found in the bits.

float64 weights go to the reference: rounded to float32 first, they could get another code.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3_core.custom_op import custom_op
from k3_core.ops.mx_quantize import reference
from k3_core.quant import BLOCK, MXTensor


@custom_op("mx_quantize.cpu", is_differentiable=False)
def mx_quantize(w: Tensor, *, block: int = BLOCK) -> MXTensor:
    """Quantise w [..., N] to MXFP4 blocks of 32 along the last dimension; as the reference."""
    if w.dtype == torch.float64:
        return reference.mx_quantize(w, block=block)
    blocks, largest = reference.checked_blocks(w, block, torch.float32)
    exponent = reference.scale_exponent(largest)
    scaled = blocks * torch.ldexp(torch.ones_like(largest), -exponent).unsqueeze(-1)
    codes = _nearest_codes(scaled).flatten(-2)
    packed = codes[..., 0::2] | codes[..., 1::2] << 4
    return MXTensor(packed, (exponent + reference.BIAS).to(torch.uint8))


def _nearest_codes(scaled: Tensor) -> Tensor:
    """E2M1 codes (uint8 0..15) of float32 values in units of their block's scale, ties to even.

    From 1 on a code is the exponent above one bit of the mantissa: half of the bit that is cut off
    is added, a little less to even codes. Below, the codes are 0, 1 and 2 for 0, a half and 1.
    """
    magnitude = scaled.abs().clamp_(max=6.0)
    bits = magnitude.view(torch.int32)
    kept = (bits >> 22 & 1).add_(bits).add_(0x1FFFFF) >> 22
    above = kept - (2 * 127 - 2)
    below = (magnitude * 2).round_().to(torch.int32)  # `round` takes ties to even
    codes = torch.where(magnitude < 1, below, above).to(torch.uint8)
    return codes.bitwise_or_(torch.signbit(scaled).to(torch.uint8) << 3)
