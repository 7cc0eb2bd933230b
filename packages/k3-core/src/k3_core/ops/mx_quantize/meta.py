"""Results of mx_quantize without values, for graphs."""

from __future__ import annotations

import torch
from torch import Tensor

from k3_core.quant import BLOCK, MXTensor


def meta(w: Tensor, *, block: int = BLOCK) -> MXTensor:
    """Two codes a byte, and a scale a block."""
    *lead, width = w.shape
    packed = w.new_empty(*lead, width // 2, dtype=torch.uint8)
    return MXTensor(packed, w.new_empty(*lead, width // BLOCK, dtype=torch.uint8))
