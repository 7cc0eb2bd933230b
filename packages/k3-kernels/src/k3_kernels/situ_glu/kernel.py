"""SiTU-GLU element by element in float32 (report 4.1): bandwidth bound, 3 values moved each."""

import triton
import triton.language as tl

from k3_kernels.early import wait_for_inputs
from k3_kernels.tl_math import situ


@triton.jit
def situ_glu_kernel(
    gate_ptr,
    up_ptr,
    out_ptr,
    width,
    gate_stride,
    up_stride,
    beta,
    linear_beta,
    HAS_CAP: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """Rows of `width` values; gate and up may be the two halves of one wider matrix."""
    wait_for_inputs(IS_EARLY)
    # A program stays in one row, which spares a 64-bit division an element.
    num_tiles = tl.cdiv(width, BLOCK)
    pid = tl.program_id(0).to(tl.int64)
    row, column = pid // num_tiles, (pid % num_tiles) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=mask, other=0.0).to(tl.float32)
    out = situ(gate, up, beta, linear_beta, HAS_CAP, out_ptr.dtype.element_ty == tl.float32)
    tl.store(out_ptr + row * width + column, out.to(out_ptr.dtype.element_ty), mask=mask)
