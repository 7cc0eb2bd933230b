"""Backward of RMSNorm over D, and of the sigmoid gate after it (architecture 3, report 1.1 step 6).

y = x r w s with r = rsqrt(mean(x^2) + eps) and s = sigmoid(gate) (1 without a gate). With
g = dy w s: dx = r (g - x r^2 sum(g x) / D), dw = sum of dy s x r, dgate = dy x r w s (1 - s).
r is made again; nothing but the inputs is kept.

Floor: x, gate, dy read, dx and dgate written, 237 us for 8192 x 96 x 128 in bfloat16 at 4.25 TB/s;
without a gate three rows, 83 us for 8192 x 7168. Programs walk over tiles of rows, which they load
ahead, and keep the sums of dw in registers. 37 instructions a value with the gate, 126 us;
predicted 270 and 105 us.

Legend: T tokens, H heads, D width, P programs.
"""

import triton
import triton.language as tl

from k3_kernels.tl_math import sigmoid


@triton.jit
def norm_backward_kernel(
    x_ptr,
    weight_ptr,
    gate_ptr,
    d_y_ptr,
    d_x_ptr,
    d_gate_ptr,
    partial_ptr,
    num_rows,
    num_programs,
    x_stride_t,
    x_stride_h,
    gate_stride_t,
    gate_stride_h,
    d_y_stride_t,
    d_y_stride_h,
    eps,
    H: tl.constexpr,
    D: tl.constexpr,
    DPAD: tl.constexpr,
    BR: tl.constexpr,
    HAS_GATE: tl.constexpr,
    NEEDS_X: tl.constexpr,
    NEEDS_GATE: tl.constexpr,
    NEEDS_WEIGHT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dx and dgate [T, H, D], and a program's sums of dw [P, D]; a row is a (token, head)."""
    pid = tl.program_id(0)
    d = tl.arange(0, DPAD)[None, :]
    weight = tl.load(weight_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    d_weight = tl.zeros((BR, DPAD), tl.float32)
    for tile in tl.range(pid, tl.cdiv(num_rows, BR), num_programs, num_stages=STAGES):
        row = tl.arange(0, BR)[:, None].to(tl.int64) + tile * BR
        mask = (row < num_rows) & (d < D)
        t, h = row // H, row % H
        x_at = x_ptr + (t * x_stride_t + h * x_stride_h) + d
        d_y_at = d_y_ptr + (t * d_y_stride_t + h * d_y_stride_h) + d
        x = tl.load(x_at, mask=mask, other=0.0).to(tl.float32)
        d_y = tl.load(d_y_at, mask=mask, other=0.0).to(tl.float32)
        r = tl.rsqrt(tl.sum(x * x, axis=1)[:, None] / D + eps)
        normed = x * r
        out_at = row * D + d
        if HAS_GATE:
            gate_at = gate_ptr + (t * gate_stride_t + h * gate_stride_h) + d
            gate = sigmoid(tl.load(gate_at, mask=mask, other=0.0).to(tl.float32))
            ungated = d_y
            d_y *= gate
            if NEEDS_GATE:
                d_gate = ungated * normed * weight * (gate - gate * gate)
                d_gate = d_gate.to(d_gate_ptr.dtype.element_ty)
                tl.store(d_gate_ptr + out_at, d_gate, mask=mask)
        if NEEDS_WEIGHT:
            d_weight += d_y * normed
        if NEEDS_X:
            scaled = d_y * weight
            mean = tl.sum(scaled * normed, axis=1)[:, None] / D
            d_x = r * (scaled - normed * mean)
            tl.store(d_x_ptr + out_at, d_x.to(d_x_ptr.dtype.element_ty), mask=mask)
    if NEEDS_WEIGHT:
        partial_at = partial_ptr + pid.to(tl.int64) * D + d
        tl.store(partial_at, tl.sum(d_weight, axis=0)[None, :], mask=d < D)
