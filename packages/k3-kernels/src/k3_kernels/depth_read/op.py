"""depth_read by Triton: every source read once, the sum and the norm on the way. D model width."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from k3_core.ops.depth_read.compose import check_added
from k3_kernels.attn_res.op import Mix, check_values, fits, mix
from k3_kernels.depth_read import cpu
from k3_kernels.launch import check_floats, needs_grad


def depth_read(
    sources: Sequence[Tensor],
    prefix_TD: Tensor,
    added_TD: Tensor | None,
    norm_D: Tensor,
    proj_1D: Tensor,
    out_norm_D: Tensor,
    *,
    eps: float,
    out_eps: float,
) -> tuple[Tensor, Tensor]:
    """As `k3_core.ops.depth_read.DepthRead`; the form in plain torch serves tensors of
    different dtypes and more sources than the kernels take."""
    values = [*sources, prefix_TD]
    weights = (norm_D, proj_1D, out_norm_D)
    is_mixed = added_TD is not None and added_TD.dtype != prefix_TD.dtype
    if is_mixed or not fits(values):
        args = (sources, prefix_TD, added_TD, *weights)
        return cpu.depth_read(*args, eps=eps, out_eps=out_eps)
    check_values("depth_read", values, norm_D, proj_1D)
    check_added(prefix_TD, added_TD)
    check_floats("depth_read", out_norm=out_norm_D)
    if out_norm_D.shape != norm_D.shape:
        raise ValueError(
            f"depth_read: out_norm is {tuple(out_norm_D.shape)}, the norm of the keys "
            f"{tuple(norm_D.shape)}; both are [D]"
        )
    if needs_grad(*values, added_TD, *weights):
        x_TD, sum_TD = Mix.apply(eps, out_eps, added_TD, *weights, *values)
        return x_TD, prefix_TD if sum_TD is None else sum_TD
    x_TD = torch.empty_like(prefix_TD, memory_format=torch.contiguous_format)
    sum_TD = prefix_TD if added_TD is None else torch.empty_like(x_TD)
    mix(values, norm_D, proj_1D, x_TD, eps, added_TD, sum_TD, out_norm_D, out_eps)
    return x_TD, sum_TD
