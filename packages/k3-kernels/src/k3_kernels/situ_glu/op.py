"""situ_glu by Triton."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from k3_core.ops.situ_glu import reference
from k3_kernels.launch import check_floats, needs_grad
from k3_kernels.situ_glu.kernel import situ_glu_kernel

# Values and warps of a program.
TILE = (2048, 4)


def situ_glu(gate: Tensor, up: Tensor, *, beta: float, linear_beta: float | None) -> Tensor:
    """beta tanh(gate/beta) sigmoid(gate) * linear_beta tanh(up/linear_beta), same shape and dtype.

    Halves of one joined projection are read in place. Calls that need gradients run
    `situ_glu.reference`.
    """
    if needs_grad(gate, up) or gate.shape != up.shape:
        # The reference also raises for shapes that differ.
        return reference.situ_glu(gate, up, beta=beta, linear_beta=linear_beta)
    check_floats("situ_glu", gate=gate, up=up)
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if not out.numel():
        return out
    gate_rows, up_rows = _rows(gate), _rows(up)
    if gate_rows.is_contiguous() and up_rows.is_contiguous():
        # One long row, whose last tile alone may be partly empty.
        gate_rows, up_rows = gate_rows.view(1, -1), up_rows.view(1, -1)
    num_rows, width = gate_rows.shape
    block, num_warps = TILE
    situ_glu_kernel[(num_rows * triton.cdiv(width, block),)](
        gate_rows,
        up_rows,
        out,
        width,
        gate_rows.stride(0),
        up_rows.stride(0),
        beta,
        0.0 if linear_beta is None else linear_beta,
        HAS_CAP=linear_beta is not None,
        BLOCK=block,
        num_warps=num_warps,
    )
    return out


def _rows(x: Tensor) -> Tensor:
    """`x` as a matrix whose rows are contiguous; a copy only when no view is."""
    rows = x.reshape(-1, x.shape[-1]) if x.dim() else x.reshape(1, 1)
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()
