"""moe_experts on a CPU: rows sorted by expert once, one matmul per expert that was hit.

R rows sorted by expert (tokens x routes), E experts, I and O input and output width.
"""

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from k3_core.ops.math import math_dtype
from k3_core.ops.moe_experts.reference import Activation, check_routes
from k3_core.ops.moe_experts.weights import ExpertStack, expert_weights
from k3_core.ops.once import refuse_second_derivative


def moe_experts(
    x_TD: Tensor,
    idx_Tk: Tensor,
    weight_Tk: Tensor,
    w1: ExpertStack,
    w3: ExpertStack,
    w2: ExpertStack,
    *,
    activation: Activation,
) -> Tensor:
    """The same function as the reference; no scatter-add, so its sums have a fixed order."""
    check_routes(x_TD, idx_Tk, weight_Tk, w1.shape[0])
    order, counts = sort_by_expert(idx_Tk, w1.shape[0])
    sizes = counts.tolist()
    rows = x_TD.index_select(0, order // idx_Tk.shape[1])
    hidden = activation(_grouped(rows, w1, sizes), _grouped(rows, w3, sizes))
    return combine(_grouped(hidden, w2, sizes), order, weight_Tk, x_TD)


def sort_by_expert(idx_Tk: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Flat route positions ordered by expert (stable), and the rows of each expert."""
    flat = idx_Tk.reshape(-1)
    order = torch.argsort(flat, stable=True)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
    return order, counts.scatter_add_(0, flat, torch.ones_like(flat))


def combine(sorted_rows: Tensor, order: Tensor, weight_Tk: Tensor, x_TD: Tensor) -> Tensor:
    """Bring expert outputs back to token order and sum a token's routes in float32."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    y_TkD = sorted_rows.index_select(0, inverse).unflatten(0, weight_Tk.shape).to(math_dtype(x_TD))
    return (y_TkD * weight_Tk.to(y_TkD.dtype)[..., None]).sum(1).to(x_TD.dtype)


def _grouped(rows_RI: Tensor, stack: ExpertStack, sizes: list[int]) -> Tensor:
    """Rows times the matrix of their expert, [R, O]; the first `sizes[0]` rows are expert 0's."""
    result: Tensor = _GroupedLinear.apply(rows_RI, stack, sizes)
    return result


class _GroupedLinear(torch.autograd.Function):
    """One node for all experts: autograd's own would be several nodes for each of them.

    Packed experts are decoded as they are used, again in the backward, and get no gradient.
    """

    @staticmethod
    def forward(ctx: Any, rows_RI: Tensor, stack: ExpertStack, sizes: list[int]) -> Tensor:
        ctx.sizes = sizes
        ctx.packed = None if isinstance(stack, Tensor) else stack
        ctx.save_for_backward(rows_RI, stack if ctx.packed is None else None)
        out_RO = rows_RI.new_empty(rows_RI.shape[0], stack.shape[1])
        for _, rows, weight_OI in _hits(sizes, stack, rows_RI.dtype):
            torch.mm(rows_RI[rows], weight_OI.mT, out=out_RO[rows])
        return out_RO

    @staticmethod
    def backward(ctx: Any, d_out_RO: Tensor) -> tuple[Tensor, Tensor | None, None]:
        refuse_second_derivative("moe_experts")
        rows_RI, plain_EOI = ctx.saved_tensors
        stack = plain_EOI if ctx.packed is None else ctx.packed
        d_rows_RI = torch.empty_like(rows_RI)
        d_stack_EOI = torch.zeros_like(plain_EOI) if ctx.needs_input_grad[1] else None
        for expert, rows, weight_OI in _hits(ctx.sizes, stack, d_out_RO.dtype):
            torch.mm(d_out_RO[rows], weight_OI, out=d_rows_RI[rows])
            if d_stack_EOI is not None:
                d_stack_EOI[expert] = d_out_RO[rows].mT @ rows_RI[rows]
        return d_rows_RI, d_stack_EOI, None


def _hits(
    sizes: list[int], stack: ExpertStack, dtype: torch.dtype
) -> Iterator[tuple[int, slice, Tensor]]:
    """(expert, its rows, its matrix) of the experts that were hit."""
    ends = list(accumulate(sizes, initial=0))
    experts = [expert for expert, size in enumerate(sizes) if size]
    weights = expert_weights(stack, experts, dtype)
    for expert, weight_OI in zip(experts, weights, strict=True):
        yield expert, slice(ends[expert], ends[expert + 1]), weight_OI
