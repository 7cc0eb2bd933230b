"""gated_rms_norm by Triton. T tokens, H heads, V value dim."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from k3_core.custom_op import Gradients, Needs, custom_op
from k3_core.ops.gated_rms_norm import reference
from k3_kernels.gated_rms_norm.kernel import gated_rms_norm_kernel
from k3_kernels.launch import check_floats, last_contiguous
from k3_kernels.rms_norm.backward import norm_backward

# Values a program holds, and its warps: 16 values a thread and two inputs.
TILE, NUM_WARPS = 2048, 4


def gated_rms_norm(x_THV: Tensor, weight_V: Tensor, gate_THV: Tensor, *, eps: float) -> Tensor:
    """RMSNorm over V, times sigmoid(gate), in the gate's dtype; strided x and gate are read as is.

    Nothing but the inputs is kept for the backward.
    """
    if x_THV.shape != gate_THV.shape or weight_V.shape != x_THV.shape[-1:]:
        # The reference raises.
        return reference.gated_rms_norm(x_THV, weight_V, gate_THV, eps=eps)
    check_floats("gated_rms_norm", x=x_THV, weight=weight_V, gate=gate_THV)
    return _gated_rms_norm(x_THV, weight_V, gate_THV, eps=eps)


def _backward(
    grads: Sequence[Tensor],
    saved: Sequence[Tensor],
    needs: Needs,
    x_THV: Tensor,
    weight_V: Tensor,
    gate_THV: Tensor,
    eps: float,
) -> Gradients:
    wanted = needs["x_THV"], needs["weight_V"], needs["gate_THV"]
    d_x, d_weight, d_gate = norm_backward(x_THV, weight_V, gate_THV, grads[0], eps, wanted)
    return {"x_THV": d_x, "weight_V": d_weight, "gate_THV": d_gate}


@custom_op("gated_rms_norm.triton", backward=_backward)
def _gated_rms_norm(x_THV: Tensor, weight_V: Tensor, gate_THV: Tensor, *, eps: float) -> Tensor:
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
