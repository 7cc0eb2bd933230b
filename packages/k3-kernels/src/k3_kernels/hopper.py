"""What kernels in Gluon ask of a machine and of their tensors."""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor


@cache
def has_gluon(device: torch.device) -> bool:
    """Whether kernels in Gluon for Hopper run on `device`: capability 9.0 and triton 3.6 or later.

    They use instructions of exactly that capability, and cannot be interpreted.
    """
    if device.type != "cuda" or triton.knobs.runtime.interpret:
        return False
    version = tuple(int(x) for x in triton.__version__.split(".")[:2])
    return version >= (3, 6) and torch.cuda.get_device_capability(device) == (9, 0)


def fits_descriptors(*tensors: Tensor) -> bool:
    """Whether every row starts on the 16-byte boundaries that tensor descriptors need."""
    return all(
        x.data_ptr() % 16 == 0 and all(s * x.element_size() % 16 == 0 for s in x.stride()[:-1])
        for x in tensors
    )
