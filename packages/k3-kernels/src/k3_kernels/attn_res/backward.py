"""Gradients of attn_res and depth_read by Triton. T tokens, D model width, P programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from k3_kernels.attn_res.backward_kernel import mix_backward_kernel
from k3_kernels.column_sums import column_sums
from k3_kernels.launch import aligned, fitting_stages


class Tile(NamedTuple):
    """Values of a row that one warp holds, most warps, programs of most warps (smaller ones are as
    many more), stages of the stream of rows, most registers (None: any)."""

    values: int
    num_warps: int
    programs: int
    stages: int
    num_registers: int | None = None


TILE = Tile(512, 16, 132, 4, 128)


class MixGradients(NamedTuple):
    """Gradients of the sources (None where not needed), the norm, proj and the output norm."""

    values: list[Tensor | None]
    norm_D: Tensor | None
    proj_1D: Tensor | None
    out_norm_D: Tensor | None


def mix_backward(
    values: Sequence[Tensor],
    norm_D: Tensor,
    proj_1D: Tensor,
    out_norm_D: Tensor | None,
    saved: Tensor,
    d_out_TD: Tensor,
    d_sum_TD: Tensor | None,
    out_eps: float,
    needs: Sequence[bool],
) -> MixGradients:
    """needs: of every source, then of norm and proj. saved: as `attn_res_kernel` writes it."""
    (num_tokens, width), device = d_out_TD.shape, d_out_TD.device
    d_out_TD = aligned(d_out_TD)
    d_values = [torch.empty_like(d_out_TD) if is_needed else None for is_needed in needs[:-2]]
    padded = triton.next_power_of_2(width)
    tile = TILE
    num_warps = max(1, min(tile.num_warps, padded // tile.values))
    num_programs = min(num_tokens, tile.programs * (tile.num_warps // num_warps))
    partial = torch.empty(2, num_programs, width, dtype=torch.float32, device=device)
    rows = (d_out_TD, d_out_TD if d_sum_TD is None else aligned(d_sum_TD), *map(aligned, values))
    if d_out_TD.numel():
        mix_backward_kernel[(num_programs,)](
            rows,
            tuple(d_out_TD if d_value is None else d_value for d_value in d_values),
            saved,
            norm_D.contiguous(),
            proj_1D.contiguous(),
            norm_D if out_norm_D is None else out_norm_D.contiguous(),
            partial[0],
            partial[1],
            num_tokens,
            num_programs,
            sum(1 << i for i, is_needed in enumerate(needs[:-2]) if is_needed),
            out_eps,
            D=width,
            DPAD=padded,
            NUM_SOURCES=len(values),
            HAS_SUM=d_sum_TD is not None,
            HAS_NORM=out_norm_D is not None,
            NEEDS_QUERY=needs[-2] or needs[-1],
            STAGES=fitting_stages(tile.stages, padded * d_out_TD.element_size()),
            num_warps=num_warps,
            maxnreg=tile.num_registers,
        )

    def summed(like: Tensor, part: int, factor: Tensor | None) -> Tensor:
        return column_sums(partial[part], like.dtype, factor).view(like.shape)

    return MixGradients(
        d_values,
        summed(norm_D, 0, proj_1D) if needs[-2] else None,
        summed(proj_1D, 0, norm_D) if needs[-1] else None,
        None if out_norm_D is None else summed(out_norm_D, 1, None),
    )
