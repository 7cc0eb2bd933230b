"""moe_experts with gradients: the dispatch input is all that is kept of the activations.

Forward: rows gathered and padded, up- with SiTU-GLU, down-projection, sum over routes. Backward
(report 7.1, 7.2), of a row with weight w and gradient g of its token's output: gate and up again;
u = W2^T g; the weight's gradient is <h, u>, so that the expert's output is never made again;
dW2 = sum of g (w h)^T; dgate, dup of w u; dW1, dW3 = sums of dgate x^T, dup x^T; dx summed over
routes. Every sum has one order. Rounding to MXFP4 and MXFP8 is made again as well, and passes
gradients on unchanged (report 8.7).

On an H200, 32,768 rows of 112 experts of 3584 -> 3072 are 11 products of .72 TFLOP, two of them
made again: 10.4 ms at 761 TFLOP/s, 11.3 as an expert's 292 rows are 320 for eight of them and 304
for three. Measured, the eight take 9.3 ms, 686 TFLOP/s of what they multiply. The passes between
them move 3.6 GB: .85 ms, .95 measured.

Legend: T tokens, k routes a token, S padded rows, E experts, D width, I expert width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from k3_core.ops.moe_experts.weights import ExpertStack
from k3_core.quant import MXTensor
from k3_kernels.launch import aligned
from k3_kernels.moe_experts import products
from k3_kernels.moe_experts.rows import (
    Betas,
    PaddedPlan,
    gather_rows,
    hidden_gradients,
    make_padded_plan,
    sum_routes,
)
from k3_kernels.mx_quantize.op import mx_values
from k3_kernels.once import refuse_second_derivative

Stacks = tuple[ExpertStack, ExpertStack, ExpertStack]


class Mode(NamedTuple):
    """(beta, linear_beta) of SiTU-GLU, and what is rounded as MX formats hold it."""

    betas: Betas
    quantize_weights: bool = False
    quantize_activations: bool = False


def train_experts(
    x_TD: Tensor, idx_Tk: Tensor, weight_Tk: Tensor, stacks: Stacks, mode: Mode
) -> Tensor:
    """The op for calls that need gradients; packed stacks get none."""
    plain = [w if isinstance(w, Tensor) else None for w in stacks]
    packed = [None if isinstance(w, Tensor) else w for w in stacks]
    result: Tensor = _Experts.apply(x_TD, weight_Tk, *plain, idx_Tk, packed, mode)
    return result


def padded_experts(
    x_TD: Tensor, idx_Tk: Tensor, weight_Tk: Tensor, stacks: Sequence[ExpertStack], mode: Mode
) -> tuple[Tensor, PaddedPlan]:
    """The op on rows that are gathered and padded, and their plan."""
    num_experts, *widths = stacks[0].shape
    plan = make_padded_plan(idx_Tk, num_experts, products.block_rows(x_TD, *widths))
    first, second, down = (_dense(w, x_TD.dtype, mode) for w in stacks)
    rows_SD = gather_rows(_values(x_TD, mode), plan)
    h_SI = products.up_product(rows_SD, plan, first, second, mode.betas)
    y_SD = products.down_product(_values(h_SI, mode), plan, down)
    weight_Tk = weight_Tk.contiguous()
    return sum_routes(y_SD, plan.place, plan.num_rows, weight_Tk, is_sorted=True), plan


class _Experts(torch.autograd.Function):
    """Keeps x, ids, weights of routes, experts and the plan."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weight_Tk: Tensor,
        w1: Tensor | None,
        w3: Tensor | None,
        w2: Tensor | None,
        idx_Tk: Tensor,
        packed: list[MXTensor | None],
        mode: Mode,
    ) -> Tensor:
        ctx.mode, ctx.packed = mode, packed
        ctx.save_for_backward(x_TD, weight_Tk, w1, w3, w2)
        stacks = _stacks((w1, w3, w2), packed)
        out_TD, ctx.plan = padded_experts(x_TD, idx_Tk, weight_Tk, stacks, mode)
        return out_TD

    @staticmethod
    def backward(ctx: Any, d_out_TD: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("moe_experts")
        x_TD, weight_Tk, *plain = ctx.saved_tensors
        stacks = _stacks(plain, ctx.packed)
        d_inputs = _gradients(
            x_TD, weight_Tk, stacks, ctx.plan, ctx.mode, d_out_TD, ctx.needs_input_grad[:5]
        )
        return *d_inputs, None, None, None


def _stacks(plain: Sequence[Tensor | None], packed: Sequence[MXTensor | None]) -> list[ExpertStack]:
    """Of each pair the one that is there."""
    both = zip(plain, packed, strict=True)
    return [stack for pair in both for stack in pair if stack is not None]


def _gradients(
    x_TD: Tensor,
    weight_Tk: Tensor,
    stacks: list[ExpertStack],
    plan: PaddedPlan,
    mode: Mode,
    d_out_TD: Tensor,
    needs: tuple[bool, ...],
) -> list[Tensor | None]:
    """Of x, the routes' weights, w1, w3 and w2; None where not in `needs`."""
    needs_x, needs_weight, *needs_stacks = needs
    first, second, down = (_dense(w, x_TD.dtype, mode) for w in stacks)
    rows_SD = gather_rows(_values(x_TD, mode), plan)
    gate_SI, up_SI = products.gate_and_up(rows_SD, plan, first, second)
    d_rows_SD = gather_rows(d_out_TD, plan)
    hidden_SI = products.hidden_product(d_rows_SD, plan, down)
    d_weight_Tk = hidden_gradients(
        hidden_SI,
        gate_SI,
        up_SI,
        plan,
        weight_Tk.contiguous(),
        mode.betas,
        mode.quantize_activations,
    )
    # From here on gate and up hold their gradients.
    pairs = (gate_SI, rows_SD), (up_SI, rows_SD), (d_rows_SD, hidden_SI)
    d_stacks = [
        products.weight_gradient(*pair, plan, stack.dtype)
        if is_needed and isinstance(stack, Tensor)
        else None
        for pair, stack, is_needed in zip(pairs, stacks, needs_stacks, strict=True)
    ]
    d_x_TD = None
    if needs_x:
        d_rows_SD = products.input_product(gate_SI, up_SI, plan, first, second)
        d_x_TD = sum_routes(d_rows_SD, plan.place, plan.num_rows, None, is_sorted=True)
    return [d_x_TD, d_weight_Tk if needs_weight else None, *d_stacks]


def _dense(stack: ExpertStack, dtype: torch.dtype, mode: Mode) -> Tensor:
    """The stack as the products take it, rounded to MXFP4 where that is asked for."""
    if not isinstance(stack, Tensor):
        return stack.dequantize(dtype)
    if mode.quantize_weights:
        return mx_values(stack, dtype, is_fp4=True)
    return aligned(stack.to(dtype))


def _values(x: Tensor, mode: Mode) -> Tensor:
    return mx_values(x, x.dtype, is_fp4=False) if mode.quantize_activations else x
