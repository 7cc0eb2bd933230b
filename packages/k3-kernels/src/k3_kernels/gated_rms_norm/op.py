"""gated_rms_norm by Triton. T tokens, H heads, V value dim."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from k3_core.ops.gated_rms_norm import reference
from k3_kernels.gated_rms_norm.kernel import gated_rms_norm_kernel
from k3_kernels.launch import check_floats, last_contiguous, needs_grad

# Values a program holds, and its warps: 16 values a thread and two inputs.
TILE, NUM_WARPS = 2048, 4


def gated_rms_norm(x_THV: Tensor, weight_V: Tensor, gate_THV: Tensor, *, eps: float) -> Tensor:
    """RMSNorm over V, times sigmoid(gate), in the gate's dtype; strided x and gate are read as is.

    Calls that need gradients run `gated_rms_norm.reference`.
    """
    needs_core = needs_grad(x_THV, weight_V, gate_THV)
    if needs_core or x_THV.shape != gate_THV.shape or weight_V.shape != x_THV.shape[-1:]:
        # The reference also raises for shapes that do not fit.
        return reference.gated_rms_norm(x_THV, weight_V, gate_THV, eps=eps)
    check_floats("gated_rms_norm", x=x_THV, weight=weight_V, gate=gate_THV)
    num_tokens, num_heads, dim = x_THV.shape
    x_THV, gate_THV = last_contiguous(x_THV), last_contiguous(gate_THV)
    y_THV = torch.empty(x_THV.shape, dtype=gate_THV.dtype, device=x_THV.device)
    if not y_THV.numel():
        return y_THV
    padded = triton.next_power_of_2(dim)
    block = max(1, TILE // padded)
    gated_rms_norm_kernel[(triton.cdiv(num_tokens * num_heads, block),)](
        x_THV,
        weight_V.contiguous(),
        gate_THV,
        y_THV,
        num_tokens * num_heads,
        num_heads,
        *x_THV.stride()[:2],
        *gate_THV.stride()[:2],
        eps,
        V=dim,
        VPAD=padded,
        BR=block,
        num_warps=NUM_WARPS,
    )
    return y_THV
