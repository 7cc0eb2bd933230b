"""FP8 blocks in plain torch. N values, B blocks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 128
LARGEST = 448.0
"""Of E4M3."""
SMALLEST = torch.finfo(torch.float32).tiny * LARGEST
"""What the largest value of a block counts as at least."""


def quantize(values_N: Tensor) -> tuple[Tensor, Tensor]:
    """Codes (float8_e4m3fn, whole blocks) and scales [B]; what is not finite stays so."""
    x_BC = F.pad(values_N, (0, -len(values_N) % BLOCK)).view(-1, BLOCK).float()
    largest_B = x_BC.abs().amax(-1).clamp(min=SMALLEST)
    codes_BC = (x_BC * (LARGEST / largest_B)[:, None]).to(torch.float8_e4m3fn)
    return codes_BC.view(-1), largest_B / LARGEST


def dequantize(codes_N: Tensor, scale_B: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """The first `size` values, in `dtype`."""
    x_BC = codes_N.view(-1, BLOCK).float() * scale_B[:, None]
    return x_BC.to(dtype).view(-1)[:size]
