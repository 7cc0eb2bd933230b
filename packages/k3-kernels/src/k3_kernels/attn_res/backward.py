"""Gradients of attn_res and depth_read by Triton. T tokens, D model width, P programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from k3_kernels.attn_res.backward_kernel import mix_backward_kernel
from k3_kernels.column_sums import column_sums
from k3_kernels.hopper import has_gluon
from k3_kernels.launch import aligned, fitting_stages


class Tile(NamedTuple):
    """Values of a row that one warp holds, most warps, programs of most warps (smaller ones are as
    many more), stages of the stream of rows, most registers (None: any)."""

    values: int
    num_warps: int
    programs: int
    stages: int
    num_registers: int | None = None


TILE = Tile(1024, 8, 132, 4)


class Ring(NamedTuple):
    """Of the kernel in Gluon: values of a piece of a row, warps, programs, most rows."""

    piece: int
    num_warps: int
    programs: int
    slots: int


RING = Ring(1024, 8, 132, 16)
RING_BYTES = 16 * 7168 * 2
"""Of Hopper's shared memory, next to what a reduction takes."""


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
    given = (d_out_TD, d_out_TD if d_sum_TD is None else aligned(d_sum_TD), *map(aligned, values))
    slots = ring_slots(d_out_TD, len(values) + 1 + (d_sum_TD is not None))
    kernel, num_programs, launch = _ring_launch(slots) if slots else _launch(d_out_TD)
    num_programs = min(num_tokens, num_programs)
    partial = torch.empty(2, num_programs, width, dtype=torch.float32, device=device)
    if d_out_TD.numel():
        kernel[(num_programs,)](
            given,
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
            NUM_SOURCES=len(values),
            HAS_SUM=d_sum_TD is not None,
            HAS_NORM=out_norm_D is not None,
            NEEDS_QUERY=needs[-2] or needs[-1],
            **launch,
        )

    def summed(like: Tensor, part: int, factor: Tensor | None) -> Tensor:
        return column_sums(partial[part], like.dtype, factor).view(like.shape)

    return MixGradients(
        d_values,
        summed(norm_D, 0, proj_1D) if needs[-2] else None,
        summed(proj_1D, 0, norm_D) if needs[-1] else None,
        None if out_norm_D is None else summed(out_norm_D, 1, None),
    )


def ring_slots(d_out_TD: Tensor, num_rows: int) -> int:
    """Rows in the ring of the kernel in Gluon; 0 where a token's do not fit, or it does not run."""
    width = d_out_TD.shape[1]
    slots = min(RING.slots, RING_BYTES // max(width * d_out_TD.element_size(), 1))
    fits = width > 0 and width % RING.piece == 0 and slots > num_rows
    return slots if fits and has_gluon(d_out_TD.device) else 0


def _ring_launch(slots: int) -> tuple[Any, int, dict[str, int]]:
    """Kernel, most programs and launch parameters of the kernel in Gluon."""
    # Its module compiles only where it runs, so only this line imports it.
    from k3_kernels.attn_res import gluon

    launch = {"SLOTS": slots, "PIECE": RING.piece, "num_warps": RING.num_warps}
    return gluon.mix_backward_kernel, RING.programs, launch


def _launch(d_out_TD: Tensor) -> tuple[Any, int, dict[str, int | None]]:
    """Kernel, most programs and launch parameters of the kernel in Triton."""
    padded = triton.next_power_of_2(d_out_TD.shape[1])
    num_warps = max(1, min(TILE.num_warps, padded // TILE.values))
    launch = {
        "DPAD": padded,
        "STAGES": fitting_stages(TILE.stages, padded * d_out_TD.element_size()),
        "num_warps": num_warps,
        "maxnreg": TILE.num_registers,
    }
    return mix_backward_kernel, TILE.programs * (TILE.num_warps // num_warps), launch
