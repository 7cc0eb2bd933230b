"""Rows sorted by expert and tiles of them, made on the device: no host read, fixed order.

Legend: T tokens, k routes a token, R = T k routes, E experts; BM rows a tile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3_kernels.early import early_launch, wait_for_inputs

SCAN_LIMIT = 2**23
"""Up to so many routes times experts, every expert scans all routes in one launch; above, torch
sorts, in ten."""
GROUP = 8
"""Tiles that are neighbours in time share a column block of weights."""


@dataclass(frozen=True, eq=False)
class Plan:
    """order: route of each sorted row [R]. starts: first row of each expert [E + 1].

    tile_expert, tile_row, tile_size: expert (-1: no tile), first row and rows of each tile of at
    most `block_rows`, their number the bound that R and E give, rounded up to `GROUP`; behind the
    last of tile_size the number of tiles that are there. All int32.
    """

    order: Tensor
    starts: Tensor
    tile_expert: Tensor
    tile_row: Tensor
    tile_size: Tensor
    block_rows: int


@triton.jit
def plan_rows_kernel(
    idx_ptr,
    order_ptr,
    starts_ptr,
    num_routes,
    num_experts,
    BLOCK: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """One expert a program: rows before its own, then its own, in order of the routes."""
    wait_for_inputs(IS_EARLY)
    expert = tl.program_id(0)
    before = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, num_routes, BLOCK):
        at = start + tl.arange(0, BLOCK)
        idx = tl.load(idx_ptr + at, mask=at < num_routes, other=-1)
        before += ((idx >= 0) & (idx < expert)).to(tl.int32)
    row = tl.sum(before)
    tl.store(starts_ptr + expert, row)
    for start in range(0, num_routes, BLOCK):
        at = start + tl.arange(0, BLOCK)
        idx = tl.load(idx_ptr + at, mask=at < num_routes, other=-1)
        is_own = (idx == expert).to(tl.int32)
        rank = tl.cumsum(is_own, axis=0) - is_own
        tl.store(order_ptr + row + rank, at, mask=is_own != 0)
        row += tl.sum(is_own)
    if expert == num_experts - 1:
        tl.store(starts_ptr + num_experts, row)


@triton.jit
def plan_tiles_kernel(
    starts_ptr,
    tile_expert_ptr,
    tile_row_ptr,
    tile_size_ptr,
    num_experts,
    num_tiles,
    BM: tl.constexpr,
    UNIT: tl.constexpr,
    EPAD: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """One program: the tiles of all experts, one after the other.

    As few as BM rows each allow, which share the units of an expert as evenly as they can.
    """
    wait_for_inputs(IS_EARLY)
    expert = tl.arange(0, EPAD)
    is_in = expert < num_experts
    first_row = tl.load(starts_ptr + expert, mask=is_in, other=0)
    rows = tl.load(starts_ptr + expert + 1, mask=is_in, other=0) - first_row
    units = (rows + UNIT - 1) // UNIT
    tiles = (units + BM // UNIT - 1) // (BM // UNIT)
    first_tile = tl.cumsum(tiles, axis=0) - tiles
    for i in range(tl.max(tiles)):
        begin = i * units // tl.maximum(tiles, 1) * UNIT
        end = tl.minimum((i + 1) * units // tl.maximum(tiles, 1) * UNIT, rows)
        tl.store(tile_expert_ptr + first_tile + i, expert, mask=i < tiles)
        tl.store(tile_row_ptr + first_tile + i, first_row + begin, mask=i < tiles)
        tl.store(tile_size_ptr + first_tile + i, end - begin, mask=i < tiles)
    tl.store(tile_size_ptr + num_tiles, tl.sum(tiles))
    for start in range(0, num_tiles, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(tile_expert_ptr + at, -1, mask=(at >= tl.sum(tiles)) & (at < num_tiles))


def make_plan(idx_Tk: Tensor, num_experts: int, block_rows: int) -> Plan:
    """The plan of `idx` (int64); ids outside 0..E-1 get no row (they must not be summed)."""
    order, starts = sort_routes(idx_Tk, num_experts)
    tiles = list_tiles(starts, idx_Tk.shape, block_rows, block_rows)
    return Plan(order, starts, *tiles, block_rows)


def sort_routes(idx_Tk: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """order [R] and starts [E + 1] of a plan."""
    routes = idx_Tk.reshape(-1)
    num_routes, device = routes.numel(), routes.device
    if num_routes * num_experts > SCAN_LIMIT:
        is_known = (routes >= 0) & (routes < num_experts)
        sorted_ids, positions = torch.sort(routes.where(is_known, num_experts), stable=True)
        edges = torch.arange(num_experts + 1, device=device)
        return positions.to(torch.int32), torch.searchsorted(sorted_ids, edges).to(torch.int32)
    order = torch.empty(num_routes, dtype=torch.int32, device=device)
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
    most, num_warps = (1024, 4) if num_routes <= 8192 else (4096, 16)
    block = min(most, max(16, triton.next_power_of_2(num_routes)))
    plan_rows_kernel[(num_experts,)](
        routes,
        order,
        starts,
        num_routes,
        num_experts,
        BLOCK=block,
        **early_launch(len(idx_Tk), device),
        num_warps=num_warps,
    )
    return order, starts


def list_tiles(
    starts: Tensor, routes: Sequence[int], block_rows: int, unit: int
) -> tuple[Tensor, Tensor, Tensor]:
    """tile_expert, tile_row and tile_size of tiles cut at units; `starts` may be padded to them.

    routes: (T, k).
    """
    num_experts, num_routes = starts.numel() - 1, math.prod(routes)
    bound = min(num_routes, num_experts) + num_routes // block_rows
    num_tiles = triton.cdiv(max(bound, 1), GROUP) * GROUP
    like: dict[str, Any] = {"dtype": torch.int32, "device": starts.device}
    expert, row, size = (torch.empty(num_tiles + i // 2, **like) for i in range(3))
    plan_tiles_kernel[(1,)](
        starts,
        expert,
        row,
        size,
        num_experts,
        num_tiles,
        BM=block_rows,
        UNIT=unit,
        EPAD=triton.next_power_of_2(num_experts),
        BLOCK=1024,
        **early_launch(routes[0], starts.device),
        num_warps=4,
    )
    return expert, row, size
