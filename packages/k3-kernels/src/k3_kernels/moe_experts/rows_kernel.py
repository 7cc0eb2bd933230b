"""Rows of each expert padded to whole tiles, and their way there and back.

The products read rows through tensor descriptors, which know no masks: rows of zeros fill what an
expert leaves of its last tile. Legend: R routes, k a token, S padded rows, E experts, D width,
I expert width.
"""

import triton
import triton.language as tl

from k3_kernels.mx_quantize.kernel import mx_rounded
from k3_kernels.tl_math import cap_and_slope, sigmoid


@triton.jit
def pad_rows_kernel(
    order_ptr,
    starts_ptr,
    padded_starts_ptr,
    padded_order_ptr,
    place_ptr,
    num_experts,
    num_rows,
    PAD: tl.constexpr,
    EPAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One expert a program: padded_order [S], place [R] (row of a route).

    The order says -1 where an expert's padding has no route, -2 behind all experts.
    """
    expert = tl.program_id(0)
    others = tl.arange(0, EPAD)
    is_in = others < num_experts
    begins = tl.load(starts_ptr + others, mask=is_in, other=0)
    sizes = tl.load(starts_ptr + others + 1, mask=is_in, other=0) - begins
    padded = (sizes + PAD - 1) // PAD * PAD
    begin = tl.sum(tl.where(others == expert, begins, 0))
    size = tl.sum(tl.where(others == expert, sizes, 0))
    first = tl.sum(tl.where(others < expert, padded, 0))
    end = first + tl.sum(tl.where(others == expert, padded, 0))
    tl.store(padded_starts_ptr + expert, first)
    last = end
    if expert == num_experts - 1:
        # The rest of the bound belongs to none.
        tl.store(padded_starts_ptr + num_experts, end)
        end = num_rows
    for start in range(0, end - first, BLOCK):
        at = start + tl.arange(0, BLOCK)
        is_row = at < size
        route = tl.load(order_ptr + begin + at, mask=is_row, other=-1)
        route = tl.where(first + at < last, route, -2)
        tl.store(padded_order_ptr + first + at, route, mask=first + at < end)
        tl.store(place_ptr + route, first + at, mask=is_row)


@triton.jit
def gather_kernel(
    x_ptr, order_ptr, out_ptr, NUM_ROUTES: tl.constexpr, D: tl.constexpr, BD: tl.constexpr
):
    """out[row] = x[order[row] // k], zeros where a row has no route; none behind all experts."""
    num_blocks: tl.constexpr = (D + BD - 1) // BD
    row = (tl.program_id(0) // num_blocks).to(tl.int64)
    d = tl.program_id(0) % num_blocks * BD + tl.arange(0, BD)
    route = tl.load(order_ptr + row).to(tl.int64)
    if route == -2:
        return
    x = tl.load(x_ptr + route // NUM_ROUTES * D + d, mask=(d < D) & (route >= 0), other=0.0)
    tl.store(out_ptr + row * D + d, x, mask=d < D)


@triton.jit
def hidden_gradient_kernel(
    u_ptr,
    gate_ptr,
    up_ptr,
    order_ptr,
    weight_ptr,
    d_weight_ptr,
    beta,
    linear_beta,
    WIDTH: tl.constexpr,
    HAS_CAP: tl.constexpr,
    IS_ROUNDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row, in place: with h = situ(gate, up), rounded to MXFP8 or not, and the route's weight w

    u becomes w h, gate and up the gradients of <w u, h>; d_weight[route] = <h, u>. Rows without a
    route become zeros, and what is behind all experts stays as it is. Six values moved for each of
    S I; 58 instructions each.
    """
    row = tl.program_id(0).to(tl.int64)
    route = tl.load(order_ptr + row)
    if route == -2:
        return
    weight = tl.load(weight_ptr + route, mask=route >= 0, other=0.0).to(tl.float32)
    dtype: tl.constexpr = u_ptr.dtype.element_ty
    IS_FINE: tl.constexpr = dtype == tl.float32
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, WIDTH, BLOCK):
        column = start + tl.arange(0, BLOCK)
        at = row * WIDTH + column
        mask = column < WIDTH
        is_read = mask & (route >= 0)
        u = tl.load(u_ptr + at, mask=is_read, other=0.0).to(tl.float32)
        gate = tl.load(gate_ptr + at, mask=is_read, other=0.0).to(tl.float32)
        up = tl.load(up_ptr + at, mask=is_read, other=0.0).to(tl.float32)
        gate_value, gate_slope = cap_and_slope(gate, beta, IS_FINE)
        s = sigmoid(gate)
        up_slope = 1.0
        if HAS_CAP:
            up, up_slope = cap_and_slope(up, linear_beta, IS_FINE)
        h = gate_value * s * up
        if IS_ROUNDED:
            h = mx_rounded(h.reshape((1, BLOCK // 32, 32)), False).reshape((BLOCK,))
        total += h * u
        d_h = u * weight
        d_gate = d_h * up * s * (gate_slope + gate_value * (1.0 - s))
        tl.store(u_ptr + at, (h * weight).to(dtype), mask=mask)
        tl.store(gate_ptr + at, d_gate.to(dtype), mask=mask)
        tl.store(up_ptr + at, (d_h * gate_value * s * up_slope).to(dtype), mask=mask)
    d_weight = tl.sum(total).to(d_weight_ptr.dtype.element_ty)
    tl.store(d_weight_ptr + route, d_weight, mask=route >= 0)
