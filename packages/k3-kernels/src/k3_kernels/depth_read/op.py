"""depth_read by Triton: every source read once, the sum and the norm on the way. D model width."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from k3_core.custom_op import Gradients, Needs, custom_op
from k3_core.ops.depth_read.compose import check_added
from k3_kernels.attn_res.backward import mix_backward
from k3_kernels.attn_res.op import check_values, fits, mix, new_saved, of_one_dtype
from k3_kernels.depth_read import cpu
from k3_kernels.launch import check_floats


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
    """As `k3_core.ops.depth_read.DepthRead`; the form in plain torch serves more sources than the
    kernels take. Those of another dtype than the sum's, which x has, are converted to it."""
    if added_TD is not None and added_TD.dtype != prefix_TD.dtype:
        dtype = torch.promote_types(added_TD.dtype, prefix_TD.dtype)
        added_TD, prefix_TD = added_TD.to(dtype), prefix_TD.to(dtype)
    values = [*sources, prefix_TD]
    weights = (norm_D, proj_1D, out_norm_D)
    if not fits(values):
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
    *sources, prefix_TD = of_one_dtype(values)
    args = (sources, prefix_TD, added_TD, *weights)
    return _depth_read(*args, eps=eps, out_eps=out_eps)


def _saved(
    needs: Needs, sources: Sequence[Tensor], prefix_TD: Tensor, **_: object
) -> tuple[Tensor]:
    return (new_saved([*sources, prefix_TD]),)


def _forward(
    needs: Needs,
    sources: Sequence[Tensor],
    prefix_TD: Tensor,
    added_TD: Tensor | None,
    norm_D: Tensor,
    proj_1D: Tensor,
    out_norm_D: Tensor,
    eps: float,
    out_eps: float,
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor]]:
    values = [*sources, prefix_TD]
    saved = new_saved(values)
    return _read(values, added_TD, norm_D, proj_1D, out_norm_D, eps, out_eps, saved), (saved,)


def _backward(
    grads: Sequence[Tensor | None],
    saved: Sequence[Tensor],
    needs: Needs,
    results: Sequence[Tensor],
    sources: Sequence[Tensor],
    prefix_TD: Tensor,
    norm_D: Tensor,
    proj_1D: Tensor,
    out_norm_D: Tensor,
    out_eps: float,
) -> Gradients:
    """Gradients of `added` and the running sum are one tensor, that of their sum."""
    sum_TD = prefix_TD if len(results) == 1 else results[1]
    d_x_TD, d_sum_TD = (*grads, None)[:2]
    needs_sum = needs["prefix_TD"] or needs["added_TD"]
    d = mix_backward(
        [*sources, sum_TD],
        norm_D,
        proj_1D,
        out_norm_D,
        saved[0],
        torch.zeros_like(sum_TD) if d_x_TD is None else d_x_TD,
        d_sum_TD,
        out_eps,
        (*(needs["sources"] or ()), needs_sum, needs["norm_D"], needs["proj_1D"]),
    )
    *d_sources, d_last_TD = d.values
    return {
        "sources": d_sources,
        "prefix_TD": d_last_TD if needs["prefix_TD"] else None,
        "added_TD": d_last_TD if needs["added_TD"] else None,
        "norm_D": d.norm_D,
        "proj_1D": d.proj_1D,
        "out_norm_D": d.out_norm_D if needs["out_norm_D"] else None,
    }


@custom_op("depth_read.triton", forward=_forward, backward=_backward, saved=_saved)
def _depth_read(
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
    values = [*sources, prefix_TD]
    return _read(values, added_TD, norm_D, proj_1D, out_norm_D, eps, out_eps, None)


def _read(
    values: Sequence[Tensor],
    added_TD: Tensor | None,
    norm_D: Tensor,
    proj_1D: Tensor,
    out_norm_D: Tensor,
    eps: float,
    out_eps: float,
    saved: Tensor | None,
) -> tuple[Tensor, Tensor]:
    last_TD = values[-1]
    x_TD = last_TD.new_empty(last_TD.shape)
    sum_TD = None if added_TD is None else torch.empty_like(x_TD)
    mix(values, norm_D, proj_1D, x_TD, eps, added_TD, sum_TD, out_norm_D, out_eps, saved)
    return x_TD, last_TD if sum_TD is None else sum_TD
