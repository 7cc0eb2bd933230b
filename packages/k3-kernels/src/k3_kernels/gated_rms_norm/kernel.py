"""RMSNorm over V with a shared weight, then a sigmoid gate, both in float32 (report 1.1 step 6).

Bandwidth bound: x, gate and y once, 604 MB or 0.14 ms at T=8192, H=96, V=128 in bfloat16.
Legend: T tokens, H heads, V value dim.
"""

import triton
import triton.language as tl


@triton.jit
def gated_rms_norm_kernel(
    x_ptr,
    weight_ptr,
    gate_ptr,
    y_ptr,
    num_rows,
    num_heads,
    x_stride_t,
    x_stride_h,
    gate_stride_t,
    gate_stride_h,
    eps,
    V: tl.constexpr,
    VPAD: tl.constexpr,
    BR: tl.constexpr,
):
    """BR rows (token, head) a program."""
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    v = tl.arange(0, VPAD)
    mask = (row < num_rows)[:, None] & (v < V)[None, :]
    t, h = row // num_heads, row % num_heads
    x_at = x_ptr + (t * x_stride_t + h * x_stride_h)[:, None] + v[None, :]
    gate_at = gate_ptr + (t * gate_stride_t + h * gate_stride_h)[:, None] + v[None, :]
    x = tl.load(x_at, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_at, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + v, mask=v < V, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / V + eps)
    y = x * scale[:, None] * weight[None, :] * tl.sigmoid(gate)
    tl.store(y_ptr + row[:, None] * V + v[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)
