"""moe_experts on a CPU: rows sorted by expert once, one matmul per expert that was hit.

A few tokens of small experts take copies of their experts instead and one batched product for all:
such a call is as long as the number of its ops.
R rows sorted by expert (tokens x routes), E experts, I and O input and output width.
"""

import math
from typing import Any

import torch
from torch import Tensor

from k3_core.custom_op import custom_op
from k3_core.ops.math import math_dtype
from k3_core.ops.moe_experts.reference import Activation, Norm, check_routes
from k3_core.ops.moe_experts.weights import ExpertStack, as_mxfp4, expert_weights
from k3_core.quant import fake_mxfp8
from k3_kernels.launch import needs_grad
from k3_kernels.once import refuse_second_derivative
from k3_kernels.rms_norm.cpu import rms_norm

Hits = list[tuple[int, int]]
"""(expert, its rows) of the experts that got any, in order."""

MAX_COPIED = 2**18
"""Weights of a stack that are copied at most: they stay in the cache of a core."""


@custom_op("moe_experts.cpu")
def moe_experts(
    x_TD: Tensor,
    idx_Tk: Tensor,
    weight_Tk: Tensor,
    w1: ExpertStack,
    w3: ExpertStack,
    w2: ExpertStack,
    *,
    activation: Activation,
    norm: Norm | None = None,
    quantize_weights: bool = False,
    quantize_activations: bool = False,
) -> Tensor:
    """The same function as the reference; no scatter-add, so its sums have a fixed order."""
    check_routes(x_TD, idx_Tk, weight_Tk, w1.shape[0])
    if quantize_weights:
        w1, w3, w2 = as_mxfp4(w1, w3, w2)
    if quantize_activations:
        x_TD, activation = fake_mxfp8(x_TD), with_mxfp8(activation)
    plain = [w for w in (w1, w3, w2) if isinstance(w, Tensor)]
    if 0 < idx_Tk.numel() * math.prod(w1.shape[1:]) <= MAX_COPIED and not needs_grad(
        x_TD, weight_Tk, *plain
    ):
        out_TD = _on_copies(x_TD, idx_Tk, weight_Tk, (w1, w3, w2), activation)
    else:
        order, counts = sort_by_expert(idx_Tk, w1.shape[0])
        hits = [(expert, count) for expert, count in enumerate(counts.tolist()) if count]
        rows = x_TD.index_select(0, order // idx_Tk.shape[1])
        hidden = activation(_grouped(rows, w1, hits), _grouped(rows, w3, hits))
        out_TD = combine(_grouped(hidden, w2, hits), order, weight_Tk, x_TD)
    return out_TD if norm is None else rms_norm(out_TD, norm[0], eps=norm[1])


def with_mxfp8(activation: Activation) -> Activation:
    """The activation with its result rounded to MXFP8."""
    return lambda gate, up: fake_mxfp8(activation(gate, up))


def _on_copies(
    x_TD: Tensor,
    idx_Tk: Tensor,
    weight_Tk: Tensor,
    stacks: tuple[ExpertStack, ExpertStack, ExpertStack],
    activation: Activation,
) -> Tensor:
    """Every route with its own copy of its expert's matrices."""
    flat, (num_tokens, num_routes) = idx_Tk.reshape(-1), idx_Tk.shape
    gate, up, down_RDI = (_copies(stack, flat, x_TD.dtype) for stack in stacks)
    # The routes of a token read the same row, so their matrices are one.
    x_T1D, shape = x_TD.unsqueeze(1), (num_tokens, -1, x_TD.shape[1])
    hidden_T1H = activation(x_T1D @ gate.view(shape).mT, x_T1D @ up.view(shape).mT)
    hidden_R1I = hidden_T1H.view(num_tokens * num_routes, 1, -1)
    y_TkD = torch.bmm(hidden_R1I, down_RDI.mT).view(num_tokens, num_routes, -1)
    y_TkD = y_TkD.to(math_dtype(x_TD))
    return (y_TkD * weight_Tk.to(y_TkD.dtype).unsqueeze(-1)).sum(1).to(x_TD.dtype)


def _copies(stack: ExpertStack, flat: Tensor, dtype: torch.dtype) -> Tensor:
    if isinstance(stack, Tensor):
        return stack.index_select(0, flat).to(dtype)
    return stack[flat].dequantize(dtype)


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


def _grouped(rows_RI: Tensor, stack: ExpertStack, hits: Hits) -> Tensor:
    """Rows times the matrix of their expert, [R, O]; the first rows are those of the first hit."""
    result: Tensor = _GroupedLinear.apply(rows_RI, stack, hits)
    return result


class _GroupedLinear(torch.autograd.Function):
    """One node for all experts: autograd's own would be several nodes for each of them.

    Packed experts are decoded as they are used, again in the backward, and get no gradient.
    """

    @staticmethod
    def forward(ctx: Any, rows_RI: Tensor, stack: ExpertStack, hits: Hits) -> Tensor:
        ctx.hits = hits
        ctx.packed = None if isinstance(stack, Tensor) else stack
        ctx.save_for_backward(rows_RI, stack if ctx.packed is None else None)
        out_RO = rows_RI.new_empty(rows_RI.shape[0], stack.shape[1])
        weights = expert_weights(stack, [expert for expert, _ in hits], rows_RI.dtype)
        for weight_OI, rows, out in zip(weights, *_by_hit(hits, rows_RI, out_RO), strict=True):
            torch.mm(rows, weight_OI.mT, out=out)
        return out_RO

    @staticmethod
    def backward(ctx: Any, d_out_RO: Tensor) -> tuple[Tensor, Tensor | None, None]:
        refuse_second_derivative("moe_experts")
        rows_RI, plain_EOI = ctx.saved_tensors
        stack, experts = ctx.packed or plain_EOI, [expert for expert, _ in ctx.hits]
        d_rows_RI = torch.empty_like(rows_RI)
        outs, inputs, d_inputs = _by_hit(ctx.hits, d_out_RO, rows_RI, d_rows_RI)
        weights = expert_weights(stack, experts, d_out_RO.dtype)
        for weight_OI, d_out, d_rows in zip(weights, outs, d_inputs, strict=True):
            torch.mm(d_out, weight_OI, out=d_rows)
        if not ctx.needs_input_grad[1]:
            return d_rows_RI, None, None
        d_stack_EOI = torch.zeros_like(plain_EOI, dtype=d_out_RO.dtype)
        for expert, d_out, rows in zip(experts, outs, inputs, strict=True):
            torch.mm(d_out.mT, rows, out=d_stack_EOI[expert])
        return d_rows_RI, d_stack_EOI, None


def _by_hit(hits: Hits, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """The rows of each hit, of every tensor."""
    sizes = [count for _, count in hits]
    return [tensor.split(sizes) for tensor in tensors]
