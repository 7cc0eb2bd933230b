"""newton_schulz in plain torch on any device: the Gram form for long matrices."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from k3_core.ops.newton_schulz import reference
from k3_kernels.launch import needs_grad
from k3_kernels.newton_schulz.forms import WIDE, gram_form, is_long, on_wide


def newton_schulz(
    matrices: Tensor, *, steps: int = 5, eps: float = 1e-7, dtype: torch.dtype | None = None
) -> Tensor:
    """Push the singular values of each [m, n] matrix towards one; as the reference.

    Matrices that are not long enough, float16 and calls that need gradients are the reference's.
    """
    if steps < 1 or not is_long(matrices, dtype) or needs_grad(matrices):
        return reference.newton_schulz(matrices, steps=steps, eps=eps, dtype=dtype)
    return on_wide(matrices, dtype, partial(gram_form, steps=steps, eps=eps, small=WIDE))
