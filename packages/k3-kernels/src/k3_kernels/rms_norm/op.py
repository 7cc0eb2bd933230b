"""rms_norm by Triton. D width."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from k3_core.ops.rms_norm import reference
from k3_kernels.early import early_launch
from k3_kernels.launch import check_floats, last_contiguous, needs_grad
from k3_kernels.once import refuse_second_derivative
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
    if needs_grad(x, weight_D):
        result: Tensor = _RmsNorm.apply(x, weight_D, eps)
        return result
    return _forward(x, weight_D, eps)


class _RmsNorm(torch.autograd.Function):
    """Keeps its inputs alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        ctx.eps = eps
        ctx.save_for_backward(x, weight_D)
        return _forward(x, weight_D, eps)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("rms_norm")
        x, weight_D = ctx.saved_tensors
        rows, d_rows = (_rows(tensor).unsqueeze(1) for tensor in (x, d_y))
        needs = (*ctx.needs_input_grad[:2], False)
        d_x, d_weight_D, _ = norm_backward(rows, weight_D, None, d_rows, ctx.eps, needs)
        return None if d_x is None else d_x.view(x.shape), d_weight_D, None


def _rows(x: Tensor) -> Tensor:
    """`x` as a matrix, a view where there is one."""
    return last_contiguous(x if x.dim() == 2 else x.reshape(-1, x.shape[-1]))


def _forward(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
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
