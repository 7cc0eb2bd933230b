"""RMSNorm over D in the released order (architecture 3). Bandwidth bound: x and y once.

Legend: D width.
"""

import triton
import triton.language as tl

from k3_kernels.early import wait_for_inputs
from k3_kernels.tl_math import normed


@triton.jit
def rms_norm_kernel(
    x_ptr,
    weight_ptr,
    y_ptr,
    x_stride,
    eps,
    D: tl.constexpr,
    DPAD: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """One row a program."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, DPAD)
    mask = d < D
    weight = tl.load(weight_ptr + d, mask=mask, other=0.0)
    wait_for_inputs(IS_EARLY)
    x = tl.load(x_ptr + row * x_stride + d, mask=mask, other=0.0)
    tl.store(y_ptr + row * D + d, normed(x, weight, eps, D), mask=mask)
