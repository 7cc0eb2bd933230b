"""The padded plan of a training call, rows gathered by it and summed back over the routes.

Legend: T tokens, k routes a token, R = T k, S padded rows sorted by expert, E experts, D width,
I expert width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from k3_core.ops.moe_experts.reference import Norm
from k3_kernels.early import early_launch
from k3_kernels.moe_experts.kernel import combine_kernel
from k3_kernels.moe_experts.plan import list_tiles, sort_routes
from k3_kernels.moe_experts.rows_kernel import (
    gather_kernel,
    hidden_gradient_kernel,
    pad_rows_kernel,
)

Betas = tuple[float, float | None]
"""beta and linear_beta of SiTU-GLU."""
MAX_NORMED = 1024
"""Outputs of a program that sums routes: with a norm, all of a row."""
PAD = 64
"""Rows that an expert's are padded to: a step of the weight gradients, part of a tile of rows."""


@dataclass(frozen=True, eq=False)
class PaddedPlan:
    """order: route of each row [S], -1 for padding, -2 behind all experts.

    place: row of each route [T, k], -1 for none. starts [E + 1]: first row of each expert,
    multiples of `PAD`; begins: the same without padding. tile_expert, tile_row and tile_size: as
    in `Plan`. S is the bound that R and E give, so that no size is read from the device. All int32.
    """

    order: Tensor
    place: Tensor
    starts: Tensor
    begins: Tensor
    tile_expert: Tensor
    tile_row: Tensor
    tile_size: Tensor
    block_rows: int

    @property
    def num_rows(self) -> int:
        """S."""
        return self.order.numel()


def make_padded_plan(idx_Tk: Tensor, num_experts: int, block_rows: int) -> PaddedPlan:
    """The plan of `idx` (int64) for tiles of `block_rows`, a multiple of `PAD`."""
    sorted_R, begins = sort_routes(idx_Tk, num_experts)
    num_routes = idx_Tk.numel()
    num_rows = (num_routes + min(num_routes, num_experts) * (PAD - 1)) // PAD * PAD
    like: dict[str, Any] = {"dtype": torch.int32, "device": idx_Tk.device}
    order, starts = torch.empty(num_rows, **like), torch.empty(num_experts + 1, **like)
    place_Tk = torch.full(idx_Tk.shape, -1, **like)
    pad_rows_kernel[(num_experts,)](
        sorted_R,
        begins,
        starts,
        order,
        place_Tk,
        num_experts,
        num_rows,
        PAD=PAD,
        EPAD=triton.next_power_of_2(num_experts),
        BLOCK=1024,
        num_warps=4,
    )
    tiles = list_tiles(starts, idx_Tk.shape, block_rows, PAD)
    return PaddedPlan(order, place_Tk, starts, begins, *tiles, block_rows)


def gather_rows(x_TD: Tensor, plan: PaddedPlan) -> Tensor:
    """The rows [S, D] of x, zeros in the padding, anything behind all experts."""
    x_TD, width = x_TD.contiguous(), x_TD.shape[1]
    out_SD = torch.empty(plan.num_rows, width, dtype=x_TD.dtype, device=x_TD.device)
    block = min(4096, triton.next_power_of_2(width))
    gather_kernel[(plan.num_rows * triton.cdiv(width, block),)](
        x_TD, plan.order, out_SD, NUM_ROUTES=plan.place.shape[1], D=width, BD=block, num_warps=4
    )
    return out_SD


def sum_routes(
    rows: Tensor,
    place_Tk: Tensor,
    num_places: int,
    weight_Tk: Tensor | None,
    *,
    is_sorted: bool,
    norm: Norm | None = None,
) -> Tensor:
    """The sum [T, D] over a token's routes of weight times row, in their order; in float32.

    place: the row of each route (`is_sorted`), or its expert where the rows [R, D] lie in the order
    of the routes; a route adds nothing where it is outside 0 .. `num_places` - 1. A norm takes D up
    to `MAX_NORMED`.
    """
    (num_tokens, num_routes), width = place_Tk.shape, rows.shape[1]
    out_TD = rows.new_empty(num_tokens, width)
    block = min(MAX_NORMED, triton.next_power_of_2(width))
    combine_kernel[(num_tokens * triton.cdiv(width, block),)](
        rows,
        place_Tk,
        weight_Tk,
        out_TD if norm is None else norm[0].contiguous(),
        out_TD,
        0.0 if norm is None else norm[1],
        num_places,
        NUM_ROUTES=num_routes,
        HAS_WEIGHT=weight_Tk is not None,
        IS_SORTED=is_sorted,
        D=width,
        BD=block,
        HAS_NORM=norm is not None,
        **early_launch(num_tokens, rows.device),
        num_warps=4,
    )
    return out_TD


def hidden_gradients(
    u_SI: Tensor,
    gate_SI: Tensor,
    up_SI: Tensor,
    plan: PaddedPlan,
    weight_Tk: Tensor,
    betas: Betas,
    is_rounded: bool,
) -> Tensor:
    """The gradients [T, k] of the routes' weights w, from u = w2^T g of every row [S, I].

    u is overwritten by w h, gate and up by their gradients.
    """
    # Ids outside the range have no row.
    d_weight_Tk = torch.zeros_like(weight_Tk)
    beta, linear_beta = betas
    width = u_SI.shape[1]
    hidden_gradient_kernel[(plan.num_rows,)](
        u_SI,
        gate_SI,
        up_SI,
        plan.order,
        weight_Tk,
        d_weight_Tk,
        float(beta),
        1.0 if linear_beta is None else float(linear_beta),
        WIDTH=width,
        HAS_CAP=linear_beta is not None,
        IS_ROUNDED=is_rounded,
        BLOCK=min(1024, max(32, triton.next_power_of_2(width))),
        num_warps=4,
    )
    return d_weight_Tk
