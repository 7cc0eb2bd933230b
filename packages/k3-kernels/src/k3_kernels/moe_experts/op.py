"""moe_experts by Triton: plan (of many routes), up-projections with SiTU-GLU, down-projection, sum.

Everything stays on the device and every size follows from shapes, so a call can be captured in
a CUDA graph. T tokens, D width, I expert width, E experts, k routes a token, R = T k.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from k3_core.custom_op import custom_op
from k3_core.ops.moe_experts.reference import Activation, Norm, check_routes
from k3_core.ops.moe_experts.weights import ExpertStack
from k3_core.quant import MXTensor
from k3_kernels.early import early_launch
from k3_kernels.hopper import fits_descriptors, has_gluon
from k3_kernels.launch import check_floats, dot_precision, needs_grad
from k3_kernels.moe_experts import cpu, torch_cuda
from k3_kernels.moe_experts.activation import situ_betas
from k3_kernels.moe_experts.backward import Mode, Stacks, padded_experts, train_experts
from k3_kernels.moe_experts.kernel import grouped_kernel, unplanned_kernel
from k3_kernels.moe_experts.plan import GROUP, Plan, make_plan
from k3_kernels.moe_experts.products import uses_gluon
from k3_kernels.moe_experts.rows import MAX_NORMED, sum_routes
from k3_kernels.rms_norm.op import rms_norm


class Tile(NamedTuple):
    """Rows x outputs of a program, inputs (words of 8 if packed) a step, warps, stages; the most
    registers of a thread, None for what the compiler takes."""

    rows: int
    outputs: int
    step: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None


# By rows an expert gets on average: (largest average, plain weights, packed weights). On an H200,
# 112 experts of 3584 -> 6144 in MXFP4 and 128 rows: 415 us with 8 rows, 480 us with 16; with 4,096
# rows 942 us with 64, 2418 us with 32, since most experts then need two tiles; in bfloat16 1192 us
# with 64, 1481 with 32.
TILES = (
    (4, Tile(16, 64, 128, 4, 4), Tile(8, 64, 32, 4, 3)),
    (16, Tile(16, 64, 128, 4, 4), Tile(16, 64, 32, 4, 2)),
    (24, Tile(32, 64, 64, 4, 4), Tile(32, 64, 32, 4, 4)),
    (48, Tile(64, 64, 64, 4, 4), Tile(64, 64, 16, 4, 3, 128)),
    (96, Tile(64, 128, 64, 8, 3), Tile(64, 128, 32, 8, 3)),
    (float("inf"), Tile(128, 128, 64, 8, 3), Tile(128, 128, 16, 8, 3)),
)
TILE_NARROW = Tile(16, 64, 64, 4, 2)
"""Plain weights of up to `NARROW` inputs and few rows: 480 experts of 256 -> 384, 512 rows 50 us,
with the long steps of `TILES` 66 us. Two stages: a step of 64 sequences takes 9 us less than with
three."""
NARROW = 512
MAX_UNPLANNED = 512
"""Up to so many routes of narrow experts, each program finds its own: two launches are spared."""
MANY = 96
"""Rows an expert from which they are gathered and padded."""


@custom_op("moe_experts.triton")
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
    """As `moe_experts.reference`. Ids outside 0..E-1 add nothing (on a CPU they are refused).

    A `functools.partial` of situ_glu runs inside the up-projection; any other pointwise
    activation between the two products. Calls that need gradients or round to MX formats run
    torch's products where the activation is another one or rows do not start on the 16-byte
    boundaries that descriptors need.
    """
    check_routes(x_TD, idx_Tk, weight_Tk, w1.shape[0])
    check_floats("moe_experts", x=x_TD, weight=weight_Tk)
    _check_shapes(x_TD, w1, w3, w2)
    stacks, args = (w1, w3, w2), (x_TD, idx_Tk, weight_Tk)
    plain = [w for w in stacks if isinstance(w, Tensor)]
    quantize, betas = (quantize_weights, quantize_activations), situ_betas(activation)
    if any(quantize) or needs_grad(x_TD, weight_Tk, *plain):
        out_TD = _train(*args, stacks, activation, *quantize)
    elif betas and len(plain) == 3 and takes_padded_rows(x_TD, idx_Tk.numel(), w1):
        out_TD = padded_experts(*args, stacks, Mode(betas))[0]
    elif norm is None or _fuses(norm, w2.shape[1]):
        return _sum_experts(*args, stacks, activation, norm)
    else:
        out_TD = _sum_experts(*args, stacks, activation, None)
    return out_TD if norm is None else rms_norm(out_TD, norm[0], eps=norm[1])


def _fuses(norm: Norm, width: int) -> bool:
    """Whether the kernel that sums the routes takes the norm."""
    weight_D = norm[0]
    return weight_D.shape == (width,) and width <= MAX_NORMED and not needs_grad(weight_D)


def _sum_experts(
    x_TD: Tensor,
    idx_Tk: Tensor,
    weight_Tk: Tensor,
    stacks: Stacks,
    activation: Activation,
    norm: Norm | None,
) -> Tensor:
    """The op without gradients, on rows that are found where they lie."""
    (w1, w3, w2), (num_tokens, num_routes) = stacks, idx_Tk.shape
    if not num_tokens * w2.shape[1]:
        return x_TD.new_empty(num_tokens, w2.shape[1])
    idx_Tk, weight_Tk = idx_Tk.contiguous(), weight_Tk.contiguous()
    betas, expert_R = situ_betas(activation), idx_Tk.view(-1)
    if betas and takes_one_launch(x_TD, len(expert_R), stacks):
        from k3_kernels.moe_experts import few_gluon

        y_RD = few_gluon.run(x_TD.contiguous(), expert_R, stacks, betas)
    else:
        plan: Plan | Tensor = expert_R
        if len(expert_R) > MAX_UNPLANNED or max(w1.shape[1:]) > NARROW:
            plan = make_plan(idx_Tk, w1.shape[0], choose_tile(len(expert_R), w1).rows)
        h_RI = up_project(x_TD, plan, num_routes, w1, w3, activation, _is_packed(w2))
        y_RD = grouped(h_RI, plan=plan, num_routes=num_routes, stack=w2, is_gather=False)
    return sum_routes(y_RD, idx_Tk, w1.shape[0], weight_Tk, is_sorted=False, norm=norm)


def _train(
    x_TD: Tensor,
    idx_Tk: Tensor,
    weight_Tk: Tensor,
    stacks: Stacks,
    activation: Activation,
    quantize_weights: bool,
    quantize_activations: bool,
) -> Tensor:
    betas = situ_betas(activation)
    per_row = 16 // x_TD.element_size()
    if betas and x_TD.numel() and all(size % per_row == 0 for size in stacks[0].shape[1:]):
        mode = Mode(betas, quantize_weights, quantize_activations)
        return train_experts(x_TD, idx_Tk, weight_Tk, stacks, mode)
    is_grouped = x_TD.is_cuda and x_TD.dtype == torch.bfloat16
    function = torch_cuda.moe_experts if is_grouped else cpu.moe_experts
    return function(
        x_TD,
        idx_Tk,
        weight_Tk,
        *stacks,
        activation=activation,
        quantize_weights=quantize_weights,
        quantize_activations=quantize_activations,
    )


def takes_padded_rows(x_TD: Tensor, num_rows: int, stack: ExpertStack) -> bool:
    """Whether plain stacks take the products of training: so many rows pay for being gathered."""
    num_experts, *widths = stack.shape
    return num_rows >= MANY * num_experts and uses_gluon(x_TD, *widths)


def takes_one_launch(x_TD: Tensor, num_rows: int, stacks: Stacks) -> bool:
    """The rule of `few_gluon`: few rows, plain 16-bit stacks of whole tiles, Hopper."""
    inner, width = stacks[0].shape[1:]
    plain = [w for w in stacks if isinstance(w, Tensor) and w.dtype == x_TD.dtype]
    return (
        num_rows <= MAX_UNPLANNED
        and len(plain) == 3
        and x_TD.element_size() == 2
        and width in (128, 256)
        and inner % 64 == 0
        and all(w.is_contiguous() for w in plain)
        and fits_descriptors(*plain)
        and has_gluon(x_TD.device)
    )


def choose_tile(num_rows: int, stack: ExpertStack) -> Tile:
    """The tile for this many rows in all, from `TILES`."""
    average = num_rows / stack.shape[0]
    plain, packed = next(tiles for most, *tiles in TILES if average <= most)
    if _is_packed(stack):
        return packed
    is_narrow = stack.shape[2] <= NARROW and plain.rows == TILE_NARROW.rows
    return TILE_NARROW if is_narrow else plain


def up_project(
    x_TD: Tensor,
    plan: Plan | Tensor,
    num_routes: int,
    w1: ExpertStack,
    w3: ExpertStack,
    activation: Activation,
    is_split: bool,
) -> Tensor:
    """activation(w1 x, w3 x) of every row [R, I] of `grouped`, in four parts when `is_split`."""
    betas = situ_betas(activation)
    make = partial(grouped, plan=plan, num_routes=num_routes, is_gather=True)
    if betas is not None and _is_packed(w1) == _is_packed(w3):
        return make(matching(x_TD, w1), stack=w1, up=w3, betas=betas, is_split=is_split)
    gate, up = (make(matching(x_TD, w), stack=w, is_split=is_split) for w in (w1, w3))
    return activation(gate, up)


def matching(x_TD: Tensor, stack: ExpertStack) -> Tensor:
    """x as the kernel takes it: for packed weights in four parts, of columns 8w + i and 8w + i + 4.

    These are the halves of a register that holds nibbles i and i + 4 of a word.
    """
    if not _is_packed(stack):
        return x_TD.contiguous()
    parts = x_TD.unflatten(-1, (-1, 2, 4)).permute(0, 3, 1, 2)
    return parts.reshape(x_TD.shape).contiguous()


def grouped(
    x: Tensor,
    *,
    plan: Plan | Tensor,
    num_routes: int,
    stack: ExpertStack,
    is_gather: bool,
    up: ExpertStack | None = None,
    betas: tuple[float, float | None] | None = None,
    is_split: bool = False,
) -> Tensor:
    """W_e x of every row [R, N]; with `up` and `betas` the gated activation of both products.

    Rows are sorted by the plan or, where `plan` is the expert of each route [R], in the order of
    the routes. x is [T, K] (`is_gather`) or rows [R, K], in the form of `matching`. The result is
    rows (`is_gather`) or in the order of the routes; in four parts when `is_split`.
    """
    num_outputs, num_inputs = stack.shape[1:]
    num_rows = plan.order.numel() if isinstance(plan, Plan) else len(plan)
    tile = choose_tile(num_rows, stack)
    out = torch.empty(num_rows, num_outputs, dtype=x.dtype, device=x.device)
    beta, linear_beta = betas or (1.0, None)
    weights = [part for one in (stack, stack if up is None else up) for part in _parts(one)]
    scales = float(beta), 1.0 if linear_beta is None else float(linear_beta)
    args = (*weights, out, *scales, num_rows, num_inputs)
    num_blocks = triton.cdiv(num_outputs, tile.outputs)
    constants = {
        "NUM_ROUTES": num_routes,
        "N": num_outputs,
        "K": num_inputs,
        "IS_MX": _is_packed(stack),
        "IS_GLU": betas is not None,
        "HAS_CAP": linear_beta is not None,
        "IS_GATHER": is_gather,
        "IS_SPLIT": is_split,
        "BN": tile.outputs,
        "BK": tile.step,
        "PRECISION": dot_precision(x.dtype),
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        "maxnreg": tile.max_registers,
        **early_launch(num_rows // num_routes, x.device),
    }
    if isinstance(plan, Plan):
        tables = plan.order, plan.starts, plan.tile_expert, plan.tile_row
        grid = (plan.tile_expert.numel() * num_blocks,)
        grouped_kernel[grid](x, *tables, *args, BM=plan.block_rows, GROUP=GROUP, **constants)
    else:
        padded = max(16, triton.next_power_of_2(num_rows))
        grid = (num_rows * num_blocks,)
        constants |= {"RPAD": padded, "BM": tile.rows}
        unplanned_kernel[grid](x, plan, *args, stack.shape[0], **constants)
    return out


def _check_shapes(x_TD: Tensor, w1: ExpertStack, w3: ExpertStack, w2: ExpertStack) -> None:
    shapes = [tuple(w.shape) for w in (w1, w3, w2)]
    experts, inner, width = shapes[0]
    is_down = shapes[2][0] == experts and shapes[2][2] == inner
    if shapes[1] != shapes[0] or not is_down or x_TD.shape[1] != width:
        raise ValueError(
            f"moe_experts: x {tuple(x_TD.shape)} and weights {shapes} do not fit; w1 and w3 are "
            "[E, I, D], w2 is [E, D, I]"
        )


def _is_packed(stack: ExpertStack) -> bool:
    return isinstance(stack, MXTensor)


def _parts(stack: ExpertStack) -> tuple[Tensor, Tensor]:
    """Weights and scales; a plain stack stands in for the scales that it does not have."""
    if isinstance(stack, MXTensor):
        return stack.packed.contiguous().view(torch.int32), stack.scale.contiguous()
    return stack.contiguous(), stack
