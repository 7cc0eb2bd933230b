"""Gradients of short_conv by Triton: x, the weight and the initial state, in up to three launches.

Legend: T packed tokens, N sequences, C channels, W taps, P programs a channel tile.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from k3_kernels.column_sums import column_sums
from k3_kernels.launch import last_contiguous
from k3_kernels.short_conv import backward_kernel as kernel

Needs = tuple[bool, bool, bool]


class Tile(NamedTuple):
    """Tokens of a run, runs and channels of a program, tokens of a loop step, stages of the loop,
    warps, most registers (None: any)."""

    run: int
    runs: int
    channels: int
    unroll: int
    stages: int
    num_warps: int
    num_registers: int | None = None


TILE = Tile(32, 16, 64, 4, 3, 4)
"""More threads than channels: the weights' loads then take the layout of x's."""


def short_conv_backward(
    x_TC: Tensor,
    weight_C1W: Tensor,
    initial_NCW: Tensor | None,
    cu_seqlens_N1: Tensor,
    d_y_TC: Tensor | None,
    d_final_NCW: Tensor | None,
    needs: Needs,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dx, dweight, dinitial) in the dtypes of their tensors, None where not in `needs`."""
    num_channels, num_sequences = x_TC.shape[1], cu_seqlens_N1.numel() - 1
    d_y_TC = torch.zeros_like(x_TC) if d_y_TC is None else last_contiguous(d_y_TC)
    x_TC, weight_C1W = last_contiguous(x_TC), weight_C1W.contiguous()
    # As rows of channels, like x.
    initial_NWC = None if initial_NCW is None else initial_NCW.mT.contiguous()
    d_final_NWC = None if d_final_NCW is None else d_final_NCW.mT.contiguous()
    args = x_TC, weight_C1W, cu_seqlens_N1, initial_NWC, d_y_TC, d_final_NWC
    d_x_TC, d_weight_C1W = _tokens(*args, needs[0], needs[1])
    d_initial_NCW = None
    if initial_NCW is not None and needs[2]:
        d_initial_NCW = torch.empty_like(initial_NCW, memory_format=torch.contiguous_format)
        block = min(256, triton.next_power_of_2(num_channels))
        if d_initial_NCW.numel():
            kernel.initial_backward_kernel[(num_sequences * triton.cdiv(num_channels, block),)](
                *(x_TC if tensor is None else tensor for tensor in args),
                d_initial_NCW,
                num_channels,
                x_TC.stride(0),
                d_y_TC.stride(0),
                W=weight_C1W.shape[2],
                HAS_FINAL=d_final_NWC is not None,
                BC=block,
                num_warps=4,
            )
    return d_x_TC, d_weight_C1W, d_initial_NCW


def _tokens(
    x_TC: Tensor,
    weight_C1W: Tensor,
    cu_seqlens_N1: Tensor,
    initial_NWC: Tensor | None,
    d_y_TC: Tensor,
    d_final_NWC: Tensor | None,
    needs_x: bool,
    needs_weight: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """dx and dweight, of one walk over the tokens."""
    num_tokens, num_channels = x_TC.shape
    num_sequences, width = cu_seqlens_N1.numel() - 1, weight_C1W.shape[2]
    shape, device = (num_tokens, num_channels), x_TC.device
    d_x_TC = torch.empty(shape, dtype=x_TC.dtype, device=device) if needs_x else None
    if not x_TC.numel() or not (needs_x or needs_weight):
        return d_x_TC, torch.zeros_like(weight_C1W) if needs_weight else None
    tile = TILE
    block_c = min(tile.channels, triton.next_power_of_2(num_channels))
    num_blocks = triton.cdiv(num_tokens + width - 1, tile.run * tile.runs)
    rows = (num_blocks if needs_weight else 0, width * num_channels)
    partial = torch.empty(rows, dtype=torch.float32, device=device)
    kernel.conv_backward_kernel[(num_blocks * triton.cdiv(num_channels, block_c),)](
        x_TC,
        weight_C1W,
        cu_seqlens_N1,
        x_TC if initial_NWC is None else initial_NWC,
        d_y_TC,
        x_TC if d_final_NWC is None else d_final_NWC,
        x_TC if d_x_TC is None else d_x_TC,
        partial,
        num_tokens,
        num_sequences,
        num_channels,
        x_TC.stride(0),
        d_y_TC.stride(0),
        W=width,
        STEPS=(num_sequences - 1).bit_length(),
        HAS_INITIAL=initial_NWC is not None,
        HAS_FINAL=d_final_NWC is not None,
        NEEDS_X=needs_x,
        NEEDS_WEIGHT=needs_weight,
        EVEN_C=num_channels % block_c == 0,
        RUN=tile.run,
        R=tile.runs,
        BC=block_c,
        UNROLL=tile.unroll,
        STAGES=tile.stages,
        num_warps=tile.num_warps,
        maxnreg=tile.num_registers,
    )
    if not needs_weight:
        return d_x_TC, None
    return d_x_TC, column_sums(partial, weight_C1W.dtype, groups=width).view(weight_C1W.shape)
