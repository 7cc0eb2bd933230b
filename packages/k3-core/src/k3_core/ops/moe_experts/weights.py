"""One expert's matrix out of a stack, plain or packed."""

from __future__ import annotations

import torch
from torch import Tensor

from k3_core.quant import MXTensor

ExpertStack = Tensor | MXTensor


def expert_weight(stack: ExpertStack, expert: int, dtype: torch.dtype) -> Tensor:
    """The [out, in] matrix of `expert` in `dtype`."""
    if isinstance(stack, MXTensor):
        return stack[expert].dequantize(dtype)
    return stack[expert].to(dtype)


def whole_stack(stack: ExpertStack, dtype: torch.dtype) -> Tensor:
    """All experts [E, out, in] in `dtype`."""
    if isinstance(stack, MXTensor):
        return stack.dequantize(dtype)
    return stack.to(dtype)
