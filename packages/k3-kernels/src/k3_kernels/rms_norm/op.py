"""rms_norm by Triton. D width."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from k3_core.custom_op import Gradients, Needs, custom_op
from k3_core.ops.rms_norm import reference
from k3_kernels.early import early_launch
from k3_kernels.launch import check_floats, last_contiguous
from k3_kernels.rms_norm.backward import norm_backward
from k3_kernels.rms_norm.kernel import rms_norm_kernel

MAX_WIDTH = 16384
"""Values that one program holds."""


def rms_norm(x: Tensor, weight_D: Tensor, *, eps: float) -> Tensor:
    """As `rms_norm.reference`, which serves wider rows."""
    if weight_D.shape != x.shape[-1:] or x.shape[-1] > MAX_WIDTH:
        # The reference also raises for a weight that does not fit.
        return reference.rms_norm(x, weight_D, eps=eps)
    check_floats("rms_norm", x=x, weight=weight_D)
    return _rms_norm(x, weight_D, eps=eps)


def _rows(x: Tensor) -> Tensor:
    """`x` as a matrix, a view where there is one."""
    return last_contiguous(x if x.dim() == 2 else x.reshape(-1, x.shape[-1]))


def _backward(
    grads: Sequence[Tensor],
    saved: Sequence[Tensor],
    needs: Needs,
    x: Tensor,
    weight_D: Tensor,
    eps: float,
) -> Gradients:
    rows, d_rows = (_rows(tensor).unsqueeze(1) for tensor in (x, grads[0]))
    wanted = (needs["x"], needs["weight_D"], False)
    d_x, d_weight_D, _ = norm_backward(rows, weight_D, None, d_rows, eps, wanted)
    return {"x": None if d_x is None else d_x.view(x.shape), "weight_D": d_weight_D}


@custom_op("rms_norm.triton", backward=_backward)
def _rms_norm(x: Tensor, weight_D: Tensor, *, eps: float) -> Tensor:
    width = x.shape[-1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not y.numel():
        return y
    rows = _rows(x)
    padded = triton.next_power_of_2(width)
    rms_norm_kernel[(len(rows),)](
        rows,
        weight_D.contiguous(),
        y,
        rows.stride(0),
        eps,
        D=width,
        DPAD=padded,
        **early_launch(len(rows), x.device),
        num_warps=min(8, max(1, padded // 256)),
    )
    return y
