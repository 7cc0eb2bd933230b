"""FP8: saved activations as E4M3 codes with one float32 scale for 128 values (report 7.2).

1.03 bytes a value in place of 2 or 4. Each value is off by 2.6% RMS of itself. N values, B blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3_kernels.fp8_blocks import cpu
from k3_train.memory.base import MemoryPolicy, Packed

MIN_VALUES = 4096
"""Smaller tensors stay."""
MIN_WIDTH = 16
"""So do values with shorter rows: statistics of a token, gates of a head."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class FP8(MemoryPolicy):
    """Rounds values of the graph. Integers and what ops keep for themselves (sums of exponentials,
    states, tiles) stay exact."""

    order = 10
    is_exact = False

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._quantize, self._dequantize = cpu.quantize, cpu.dequantize
        if device.type == "cuda":
            # Imported here: triton is not installed where there is no GPU.
            from k3_kernels.fp8_blocks import op

            self._quantize, self._dequantize = op.quantize, op.dequantize

    def wants(self, x: Tensor) -> bool:
        """Activations that a gradient flows through, of a size that is worth it."""
        is_large = x.numel() >= MIN_VALUES and x.shape[-1] >= MIN_WIDTH
        return is_large and x.requires_grad and x.dtype in DTYPES

    def pack(self, values_N: Tensor) -> Packed:
        """Codes [N] and scales [B]."""
        size, dtype = len(values_N), values_N.dtype
        return Packed(
            self._quantize(values_N),
            lambda codes_N, scale_B: self._dequantize(codes_N, scale_B, size, dtype),
        )
