"""FP8 blocks by Triton, as `fp8_blocks.cpu`: one launch either way. N values, B blocks."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from k3_kernels.fp8_blocks.cpu import BLOCK, LARGEST, SMALLEST
from k3_kernels.fp8_blocks.kernel import dequantize_kernel, quantize_kernel

# Blocks and warps of a program.
TILE = (32, 4)


def quantize(values_N: Tensor) -> tuple[Tensor, Tensor]:
    """Codes (float8_e4m3fn, whole blocks) and scales [B]; what is not finite stays so."""
    num_blocks, device = triton.cdiv(len(values_N), BLOCK), values_N.device
    codes_N = torch.empty(num_blocks * BLOCK, dtype=torch.float8_e4m3fn, device=device)
    scale_B = torch.empty(num_blocks, dtype=torch.float32, device=device)
    blocks, num_warps = TILE
    quantize_kernel[(triton.cdiv(num_blocks, blocks),)](
        values_N,
        codes_N,
        scale_B,
        len(values_N),
        num_blocks,
        LARGEST=LARGEST,
        SMALLEST=SMALLEST,
        BG=blocks,
        num_warps=num_warps,
    )
    return codes_N, scale_B


def dequantize(codes_N: Tensor, scale_B: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """The first `size` values, in `dtype`."""
    values_N = torch.empty(size, dtype=dtype, device=codes_N.device)
    blocks, num_warps = TILE
    dequantize_kernel[(triton.cdiv(len(scale_B), blocks),)](
        codes_N, scale_B, values_N, size, len(scale_B), BG=blocks, num_warps=num_warps
    )
    return values_N
