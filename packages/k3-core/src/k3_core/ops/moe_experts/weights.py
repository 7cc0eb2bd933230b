"""Experts' matrices out of a stack, plain or packed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from k3_core.quant import MXTensor, fake_mxfp4

ExpertStack = Tensor | MXTensor

NUM_DECODED = 2**22
"""Weights decoded at once: many small experts in one go, but never a whole large bank."""


def as_mxfp4(*stacks: ExpertStack) -> tuple[ExpertStack, ...]:
    """Plain stacks with the values that MXFP4 would keep, gradients straight through."""
    return tuple(fake_mxfp4(w) if isinstance(w, Tensor) else w for w in stacks)


def expert_weights(
    stack: ExpertStack, experts: Sequence[int], dtype: torch.dtype
) -> Iterator[Tensor]:
    """The [out, in] matrices of `experts` in `dtype`, in their order."""
    if not isinstance(stack, MXTensor):
        yield from (stack[expert].to(dtype) for expert in experts)
        return
    step = max(1, NUM_DECODED // math.prod(stack.shape[1:]))
    for first in range(0, len(experts), step):
        index = torch.tensor(experts[first : first + step], device=stack.device)
        yield from stack[index].dequantize(dtype)
