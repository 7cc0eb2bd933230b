"""situ_glu by Triton."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from k3_core.custom_op import Gradients, Needs, custom_op
from k3_core.ops.situ_glu import reference
from k3_kernels.early import early_launch
from k3_kernels.launch import check_floats
from k3_kernels.situ_glu.backward import situ_glu_backward
from k3_kernels.situ_glu.kernel import situ_glu_kernel
from k3_kernels.situ_glu.rows import as_rows

# Values and warps of a program.
TILE = (2048, 4)


def situ_glu(gate: Tensor, up: Tensor, *, beta: float, linear_beta: float | None) -> Tensor:
    """beta tanh(gate/beta) sigmoid(gate) * linear_beta tanh(up/linear_beta), same shape and dtype.

    Halves of one joined projection are read in place.
    """
    if gate.shape != up.shape:
        # The reference raises.
        return reference.situ_glu(gate, up, beta=beta, linear_beta=linear_beta)
    check_floats("situ_glu", gate=gate, up=up)
    return _situ_glu(gate, up, beta=beta, linear_beta=linear_beta)


def _backward(
    grads: Sequence[Tensor],
    saved: Sequence[Tensor],
    needs: Needs,
    gate: Tensor,
    up: Tensor,
    beta: float,
    linear_beta: float | None,
) -> Gradients:
    both = needs["gate"], needs["up"]
    d_gate, d_up = situ_glu_backward(gate, up, grads[0], beta, linear_beta, both)
    return {"gate": d_gate, "up": d_up}


@custom_op("situ_glu.triton", backward=_backward)
def _situ_glu(gate: Tensor, up: Tensor, *, beta: float, linear_beta: float | None) -> Tensor:
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if not out.numel():
        return out
    gate_rows, up_rows = as_rows(gate, up)
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
        **early_launch(gate.numel() // gate.shape[-1] if gate.dim() else 1, gate.device),
        num_warps=num_warps,
    )
    return out
