"""Small numerical helpers that several references share."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

_NOTHING = nullcontext()


def math_dtype(x: Tensor) -> torch.dtype:
    """The dtype that an op computes in: float64 for float64 input, float32 for the rest."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def rms_scale(x: Tensor, eps: float) -> Tensor:
    """rsqrt(mean(x^2) + eps) over the last axis of an `x` already in the math dtype."""
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def without_autocast(x: Tensor) -> AbstractContextManager[None]:
    """A block whose dtypes are its own, free of cost where autocast is off on the device of `x`."""
    if not torch.is_autocast_enabled(x.device.type):
        return _NOTHING
    return torch.autocast(x.device.type, enabled=False)


def in_autocast(x: Tensor) -> Tensor:
    """`x` as a product would read it: float32 in the dtype of autocast, where that is on."""
    device = x.device.type
    if x.dtype != torch.float32 or not torch.is_autocast_enabled(device):
        return x
    return x.to(torch.get_autocast_dtype(device))
