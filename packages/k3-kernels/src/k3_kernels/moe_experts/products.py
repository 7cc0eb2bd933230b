"""Launches of the grouped products of a training call, and their tiles.

Legend: S padded rows, E experts, K inputs, N outputs, I expert width, D width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from k3_kernels.hopper import has_gluon
from k3_kernels.launch import dot_precision
from k3_kernels.moe_experts.plan import GROUP
from k3_kernels.moe_experts.product_kernel import (
    row_kernel,
    up_kernel,
    weight_kernel,
)
from k3_kernels.moe_experts.rows import PAD, Betas, PaddedPlan


class Tile(NamedTuple):
    """Outputs of a program, inputs a step, warps, stages."""

    outputs: int
    step: int
    num_warps: int
    num_stages: int


class Tiles(NamedTuple):
    """Rows of a program and the tiles of each product; `weight_rows` x outputs of a gradient's."""

    rows: int
    up: Tile
    down: Tile
    hidden: Tile
    inputs: Tile
    weight_rows: int
    weights: Tile


_WIDE = Tile(256, 64, 8, 3)
HALF = Tiles(128, Tile(128, 64, 8, 3), _WIDE, _WIDE, _WIDE, 128, _WIDE)
_SLOW = Tile(64, 32, 4, 2)
FULL = Tiles(64, _SLOW, _SLOW, _SLOW, _SLOW, 64, _SLOW)
"""Of float32, whose products use no tensor cores."""


def tiles_of(dtype: torch.dtype) -> Tiles:
    """The tiles of a dtype."""
    return FULL if dtype == torch.float32 else HALF


def uses_gluon(rows: Tensor, *widths: int) -> bool:
    """Whether the kernel of `gluon.py` takes products of these widths: 16-bit rows, whole tiles."""
    is_wide = all(width % 256 == 0 for width in widths)
    return rows.dtype != torch.float32 and is_wide and PAD == 64 and has_gluon(rows.device)


def block_rows(rows: Tensor, *widths: int) -> int:
    """Most rows of a tile in the plan for these products."""
    if uses_gluon(rows, *widths):
        from k3_kernels.moe_experts import gluon

        return gluon.ROWS * gluon.WARPGROUPS[gluon.FORWARD]
    return tiles_of(rows.dtype).rows


def up_product(rows_SD: Tensor, plan: PaddedPlan, w1: Tensor, w3: Tensor, betas: Betas) -> Tensor:
    """situ(w1 x, w3 x) of every row [S, I]."""
    if uses_gluon(rows_SD, *w1.shape[1:]):
        from k3_kernels.moe_experts import gluon

        return gluon.up_product(rows_SD, plan, w1, w3, betas)
    out_SI = _like_rows(rows_SD, w1.shape[1])
    _launch_up(rows_SD, plan, w1, w3, out_SI, out_SI, betas)
    return out_SI


def gate_and_up(rows_SD: Tensor, plan: PaddedPlan, w1: Tensor, w3: Tensor) -> tuple[Tensor, Tensor]:
    """w1 x and w3 x of every row [S, I]."""
    if uses_gluon(rows_SD, *w1.shape[1:]):
        from k3_kernels.moe_experts import gluon

        return gluon.gate_and_up(rows_SD, plan, w1, w3)
    gate_SI, up_SI = (_like_rows(rows_SD, w1.shape[1]) for _ in range(2))
    _launch_up(rows_SD, plan, w1, w3, gate_SI, up_SI, None)
    return gate_SI, up_SI


def _launch_up(
    rows_SD: Tensor,
    plan: PaddedPlan,
    w1: Tensor,
    w3: Tensor,
    out_SI: Tensor,
    up_SI: Tensor,
    betas: Betas | None,
) -> None:
    tile, (num_outputs, num_inputs) = tiles_of(rows_SD.dtype).up, w1.shape[1:]
    beta, linear_beta = betas or (1.0, None)
    block = [1, tile.outputs, tile.step]
    up_kernel[_grid(plan, num_outputs, tile)](
        _describe(rows_SD, [plan.block_rows, tile.step]),
        _describe(w1, block),
        _describe(w3, block),
        plan.tile_expert,
        plan.tile_row,
        plan.starts,
        out_SI,
        up_SI,
        float(beta),
        1.0 if linear_beta is None else float(linear_beta),
        num_inputs,
        N=num_outputs,
        IS_GLU=betas is not None,
        HAS_CAP=linear_beta is not None,
        **_common(rows_SD, plan, tile),
    )


def down_product(rows_SI: Tensor, plan: PaddedPlan, w2: Tensor) -> Tensor:
    """w2 h of every row [S, D]."""
    return _launch_rows([(rows_SI, w2)], plan, tiles_of(rows_SI.dtype).down, True)


def hidden_product(d_rows_SD: Tensor, plan: PaddedPlan, w2: Tensor) -> Tensor:
    """w2^T g of every row [S, I]."""
    return _launch_rows([(d_rows_SD, w2)], plan, tiles_of(d_rows_SD.dtype).hidden, False)


def input_product(
    d_gate_SI: Tensor, d_up_SI: Tensor, plan: PaddedPlan, w1: Tensor, w3: Tensor
) -> Tensor:
    """w1^T dgate + w3^T dup of every row [S, D]."""
    pairs = [(d_gate_SI, w1), (d_up_SI, w3)]
    return _launch_rows(pairs, plan, tiles_of(d_gate_SI.dtype).inputs, False)


def _launch_rows(
    pairs: list[tuple[Tensor, Tensor]], plan: PaddedPlan, tile: Tile, has_inputs_last: bool
) -> Tensor:
    """The sum [S, N] of rows [S, K] times weights [E, N, K] (`has_inputs_last`) or [E, K, N]."""
    rows_SK, weights = pairs[0]
    if uses_gluon(rows_SK, *weights.shape[1:]):
        from k3_kernels.moe_experts import gluon

        return gluon.row_product(pairs, plan, has_inputs_last)
    num_outputs = weights.shape[1 if has_inputs_last else 2]
    block = [1, tile.outputs, tile.step] if has_inputs_last else [1, tile.step, tile.outputs]
    out_SN = _like_rows(rows_SK, num_outputs)
    described = [
        (_describe(rows, [plan.block_rows, tile.step]), _describe(matrices, block))
        for rows, matrices in pairs
    ]
    row_kernel[_grid(plan, num_outputs, tile)](
        *described[0],
        *described[-1],
        plan.tile_expert,
        plan.tile_row,
        plan.starts,
        out_SN,
        rows_SK.shape[1],
        N=num_outputs,
        HAS_MORE=len(pairs) > 1,
        HAS_INPUTS_LAST=has_inputs_last,
        **_common(rows_SK, plan, tile),
    )
    return out_SN


def weight_gradient(
    left_SM: Tensor, right_SN: Tensor, plan: PaddedPlan, dtype: torch.dtype
) -> Tensor:
    """[E, M, N]: of each expert the sum over its rows of the outer products."""
    if uses_gluon(left_SM, left_SM.shape[1], right_SN.shape[1]) and dtype == left_SM.dtype:
        from k3_kernels.moe_experts import gluon

        return gluon.weight_gradient(left_SM, right_SN, plan)
    tiles = tiles_of(left_SM.dtype)
    tile, num_experts = tiles.weights, plan.starts.numel() - 1
    out = torch.empty(
        num_experts, left_SM.shape[1], right_SN.shape[1], dtype=dtype, device=left_SM.device
    )
    blocks = triton.cdiv(out.shape[1], tiles.weight_rows) * triton.cdiv(out.shape[2], tile.outputs)
    weight_kernel[(num_experts * blocks,)](
        _describe(left_SM, [tile.step, tiles.weight_rows]),
        _describe(right_SN, [tile.step, tile.outputs]),
        plan.starts,
        out,
        M=out.shape[1],
        N=out.shape[2],
        BM=tiles.weight_rows,
        BN=tile.outputs,
        BK=tile.step,
        GROUP=GROUP,
        PRECISION=dot_precision(left_SM.dtype),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


def _like_rows(rows: Tensor, width: int) -> Tensor:
    return torch.empty(len(rows), width, dtype=rows.dtype, device=rows.device)


def _grid(plan: PaddedPlan, num_outputs: int, tile: Tile) -> tuple[int]:
    return (plan.tile_expert.numel() * triton.cdiv(num_outputs, tile.outputs),)


def _common(rows: Tensor, plan: PaddedPlan, tile: Tile) -> dict[str, object]:
    return {
        "BM": plan.block_rows,
        "BN": tile.outputs,
        "BK": tile.step,
        "GROUP": GROUP,
        "PRECISION": dot_precision(rows.dtype),
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


def _describe(x: Tensor, block: list[int]) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block)
