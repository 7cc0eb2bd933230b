"""Gradients of attn_res and depth_read by Triton. T tokens, D model width, P programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from k3_kernels.attn_res.backward_kernel import mix_backward_kernel, weight_sums_kernel
from k3_kernels.attn_res.whole_backward import whole_backward_kernel
from k3_kernels.column_sums import BLOCK, NUM_WARPS, ROWS
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


class Whole(NamedTuple):
    """Of the kernel that holds a token's sources: values that one warp holds, most warps, programs
    of one warp (larger ones are as many fewer), most registers (None: any)."""

    values: int
    num_warps: int
    programs: int
    num_registers: int | None = None


WHOLE = Whole(3072, 4, 132 * 8)


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
    """Gradients of the sources (None where not needed), the norm, proj and the output norm.

    Those of norm and proj have no values where neither is needed.
    """

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
    num_rows = len(values) + 1 + (d_sum_TD is not None)
    kernel, num_programs, launch = _choose(d_out_TD, len(values), num_rows)
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
    return MixGradients(d_values, *_weight_gradients(partial, norm_D, proj_1D, out_norm_D))


def _weight_gradients(
    partial: Tensor, norm_D: Tensor, proj_1D: Tensor, out_norm_D: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Of norm, proj and the output norm, from the sums of each program [2, P, D]."""
    _, num_rows, width = partial.shape
    d_norm_D, d_proj_1D = torch.empty_like(norm_D), torch.empty_like(proj_1D)
    d_out_norm_D = None if out_norm_D is None else torch.empty_like(out_norm_D)
    num_blocks = triton.cdiv(width, BLOCK)
    weight_sums_kernel[(num_blocks * (1 if d_out_norm_D is None else 2),)](
        partial,
        norm_D.contiguous(),
        proj_1D.contiguous(),
        d_norm_D,
        d_proj_1D,
        d_norm_D if d_out_norm_D is None else d_out_norm_D,
        num_rows,
        width,
        num_blocks,
        BP=ROWS,
        BC=BLOCK,
        num_warps=NUM_WARPS,
    )
    return d_norm_D, d_proj_1D, d_out_norm_D


def _choose(d_out_TD: Tensor, num_sources: int, num_rows: int) -> tuple[Any, int, dict[str, Any]]:
    """Kernel, most programs and launch parameters. num_rows: that a token reads at once."""
    padded = triton.next_power_of_2(d_out_TD.shape[1])
    num_warps = triton.next_power_of_2(triton.cdiv(padded * num_sources, WHOLE.values))
    if num_warps <= WHOLE.num_warps:
        launch = {"DPAD": padded, "num_warps": num_warps, "maxnreg": WHOLE.num_registers}
        return whole_backward_kernel, WHOLE.programs // num_warps, launch
    slots = ring_slots(d_out_TD, num_rows)
    return _ring_launch(slots) if slots else _stream_launch(d_out_TD)


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


def _stream_launch(d_out_TD: Tensor) -> tuple[Any, int, dict[str, int | None]]:
    """Kernel, most programs and launch parameters of the stream in Triton."""
    padded = triton.next_power_of_2(d_out_TD.shape[1])
    num_warps = max(1, min(TILE.num_warps, padded // TILE.values))
    launch = {
        "DPAD": padded,
        "STAGES": fitting_stages(TILE.stages, padded * d_out_TD.element_size()),
        "num_warps": num_warps,
        "maxnreg": TILE.num_registers,
    }
    return mix_backward_kernel, TILE.programs * (TILE.num_warps // num_warps), launch
