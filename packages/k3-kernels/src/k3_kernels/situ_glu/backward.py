"""Gradients of situ_glu by Triton."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from k3_kernels.situ_glu.backward_kernel import situ_glu_backward_kernel
from k3_kernels.situ_glu.rows import as_rows

# Values and warps of a program.
TILE = (1024, 4)


def situ_glu_backward(
    gate: Tensor,
    up: Tensor,
    d_out: Tensor,
    beta: float,
    linear_beta: float | None,
    needs: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """(dgate, dup), None where not in `needs`."""
    d_gate, d_up = (
        torch.empty(x.shape, dtype=x.dtype, device=x.device) if is_needed else None
        for x, is_needed in zip((gate, up), needs, strict=True)
    )
    if not gate.numel() or not any(needs):
        return d_gate, d_up
    rows = as_rows(gate, up, d_out)
    num_rows, width = rows[0].shape
    block, num_warps = TILE
    situ_glu_backward_kernel[(num_rows * triton.cdiv(width, block),)](
        *rows,
        gate if d_gate is None else d_gate,
        up if d_up is None else d_up,
        width,
        *(x.stride(0) for x in rows),
        beta,
        0.0 if linear_beta is None else linear_beta,
        HAS_CAP=linear_beta is not None,
        NEEDS_GATE=needs[0],
        NEEDS_UP=needs[1],
        BLOCK=block,
        num_warps=num_warps,
    )
    return d_gate, d_up
