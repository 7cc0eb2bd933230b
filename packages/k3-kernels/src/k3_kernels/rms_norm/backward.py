"""Gradients of rms_norm and gated_rms_norm by Triton. T tokens, H heads, D width, P programs."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from k3_kernels.column_sums import column_sums
from k3_kernels.launch import fitting_stages, last_contiguous
from k3_kernels.rms_norm.backward_kernel import norm_backward_kernel


class Tile(NamedTuple):
    """Values and warps of a program, most programs, stages of their loop over tiles.

    values: of whole rows, or 0 for one row. With one row fewer warps take rows of fewer values, 512
    each, and there are as many more programs.
    """

    values: int
    num_warps: int
    programs: int
    stages: int


NARROW, WIDE = Tile(4096, 8, 396, 3), Tile(0, 16, 132, 3)
NARROW_WIDTH = 128
"""Widest row of a tile of many; the loads of wider weights would give all tiles their layout."""
WARP_VALUES = 512


def launch_config(width: int, num_rows: int) -> tuple[int, int, int, int]:
    """Rows of a tile, warps, programs, stages."""
    padded = triton.next_power_of_2(width)
    tile = NARROW if padded <= NARROW_WIDTH else WIDE
    rows, num_warps, programs = max(1, tile.values // padded), tile.num_warps, tile.programs
    if not tile.values:
        num_warps = max(1, min(num_warps, padded // WARP_VALUES))
        programs *= tile.num_warps // num_warps
    return rows, num_warps, min(programs, triton.cdiv(num_rows, rows)), tile.stages


def norm_backward(
    x_THD: Tensor,
    weight_D: Tensor,
    gate_THD: Tensor | None,
    d_y_THD: Tensor,
    eps: float,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dx, dweight, dgate) in the dtypes of their tensors, None where not in `needs`."""
    num_tokens, num_heads, width = x_THD.shape
    needs_x, needs_weight, needs_gate = needs
    x_THD, d_y_THD = last_contiguous(x_THD), last_contiguous(d_y_THD)
    gate = x_THD if gate_THD is None else last_contiguous(gate_THD)
    device = x_THD.device
    d_x_THD = torch.empty(x_THD.shape, dtype=x_THD.dtype, device=device) if needs_x else None
    d_gate_THD = torch.empty(gate.shape, dtype=gate.dtype, device=device) if needs_gate else None
    if not x_THD.numel():
        return d_x_THD, torch.zeros_like(weight_D) if needs_weight else None, d_gate_THD
    num_rows, padded = num_tokens * num_heads, triton.next_power_of_2(width)
    num_loads = 2 if gate_THD is None else 3
    block, num_warps, num_programs, stages = launch_config(width, num_rows)
    shape = (num_programs if needs_weight else 0, width)
    partial_PD = torch.empty(shape, dtype=torch.float32, device=device)
    norm_backward_kernel[(num_programs,)](
        x_THD,
        weight_D.contiguous(),
        gate,
        d_y_THD,
        x_THD if d_x_THD is None else d_x_THD,
        gate if d_gate_THD is None else d_gate_THD,
        partial_PD,
        num_rows,
        num_programs,
        *x_THD.stride()[:2],
        *gate.stride()[:2],
        *d_y_THD.stride()[:2],
        eps,
        H=num_heads,
        D=width,
        DPAD=padded,
        BR=block,
        HAS_GATE=gate_THD is not None,
        NEEDS_X=needs_x,
        NEEDS_GATE=needs_gate,
        NEEDS_WEIGHT=needs_weight,
        STAGES=fitting_stages(stages, num_loads * block * padded * x_THD.element_size()),
        num_warps=num_warps,
    )
    d_weight_D = column_sums(partial_PD, weight_D.dtype) if needs_weight else None
    return d_x_THD, d_weight_D, d_gate_THD
