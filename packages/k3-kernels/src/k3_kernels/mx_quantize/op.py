"""mx_quantize by Triton: MXFP4 as k3_core's reference makes it, and MXFP8 with two scale rules."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from k3_core.custom_op import custom_op
from k3_core.ops.mx_quantize import reference
from k3_core.quant import BLOCK, MXTensor
from k3_kernels.launch import FLOATS
from k3_kernels.mx_quantize.kernel import mx_fake_kernel, mxfp4_kernel, mxfp8_kernel

LARGEST = 6.0 * 2.0**125
# Blocks of 32 values and warps of a program.
TILE = (256, 4)
SCALE_RULES = ("floor", "ceil")


@custom_op("mx_quantize.triton", is_differentiable=False)
def mx_quantize(w: Tensor, *, block: int = BLOCK) -> MXTensor:
    """As `k3_core.ops.mx_quantize.MXQuantize`, bit for bit; looks at the result once (a sync)."""
    if block != BLOCK or w.dim() == 0 or w.shape[-1] % BLOCK or w.dtype not in FLOATS:
        # float64, and the errors of what no implementation takes.
        return reference.mx_quantize(w, block=block)
    packed, scale = mxfp4_codes(w)
    if bool((scale == 255).any()):
        raise ValueError(
            f"mx_quantize of a weight {tuple(w.shape)} with NaN, infinite or huge values; "
            f"allowed: finite values up to {LARGEST:.3g}. Find the layer that diverged"
        )
    return MXTensor(packed, scale)


def mxfp4_codes(w: Tensor) -> tuple[Tensor, Tensor]:
    """packed [..., N/2] and scale [..., N/32] (uint8) without a look at the values.

    Blocks with NaN, infinite or too large values have the scale 255 (NaN).
    """
    w, num_blocks = _blocks(w)
    packed = torch.empty(*w.shape[:-1], w.shape[-1] // 2, dtype=torch.uint8, device=w.device)
    scale = torch.empty(*w.shape[:-1], w.shape[-1] // BLOCK, dtype=torch.uint8, device=w.device)
    if num_blocks:
        blocks, num_warps = TILE
        mxfp4_kernel[(triton.cdiv(num_blocks, blocks),)](
            w, packed, scale, num_blocks, LARGEST=LARGEST, BG=blocks, num_warps=num_warps
        )
    return packed, scale


def mxfp8_quantize(w: Tensor, *, rule: str = "floor") -> tuple[Tensor, Tensor]:
    """codes [..., N] (float8_e4m3fn) and scale [..., N/32] (uint8, E8M0: 2^(byte - 127)).

    rule: "floor" takes floor(log2(largest)) - 8, as the OCP text does, and saturates values above
    448 units; "ceil" the least power of two that keeps the largest value within 448. A block with
    NaN or infinity gets scale 255 and NaN codes, a block of zeros byte 0.
    """
    if rule not in SCALE_RULES:
        raise ValueError(f"mxfp8_quantize: rule {rule!r} is unknown; use one of {SCALE_RULES}")
    w, num_blocks = _blocks(w)
    codes = torch.empty(w.shape, dtype=torch.uint8, device=w.device)
    scale = torch.empty(*w.shape[:-1], w.shape[-1] // BLOCK, dtype=torch.uint8, device=w.device)
    if num_blocks:
        blocks, num_warps = TILE
        mxfp8_kernel[(triton.cdiv(num_blocks, blocks),)](
            w, codes, scale, num_blocks, IS_CEIL=rule == "ceil", BG=blocks, num_warps=num_warps
        )
    return codes.view(torch.float8_e4m3fn), scale


def mx_values(x: Tensor, dtype: torch.dtype, *, is_fp4: bool) -> Tensor:
    """x [..., N] as MXFP4 or MXFP8 holds it, in `dtype` and without a look at the values.

    The same as `k3_core.quant.fake_mxfp4` and `fake_mxfp8`, with no gradient.
    """
    x, num_blocks = _blocks(x)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    if num_blocks:
        blocks, num_warps = TILE
        mx_fake_kernel[(triton.cdiv(num_blocks, blocks),)](
            x, out, num_blocks, IS_FP4=is_fp4, BG=blocks, num_warps=num_warps
        )
    return out


def _blocks(w: Tensor) -> tuple[Tensor, int]:
    if w.dtype not in FLOATS or w.dim() == 0 or w.shape[-1] % BLOCK:
        raise ValueError(
            f"MX blocks need float32, bfloat16 or float16 with a last dimension that is a multiple "
            f"of {BLOCK}, got {w.dtype} {tuple(w.shape)}"
        )
    w = w.detach().contiguous()
    return w, w.numel() // BLOCK
