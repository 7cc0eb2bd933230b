"""fla.ops.attnres: mix of depth sources by a softmax of query . RMSNorm(source) (report 2.1).

Legend: L sources of shape [..., D], T = all leading positions, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from k3_core.ops.math import math_dtype, rms_scale
from k3_kernels.compat.fla.choose import op_for
from k3_kernels.launch import needs_grad


def fused_attnres(
    query: Tensor,
    residuals: Sequence[Tensor],
    rms_weight: Tensor,
    output_rms_weight: Tensor | None = None,
    rms_eps: float = 1e-6,
    scale: float = 1.0,
    return_weights: bool = False,
    checkpoint_level: int = 1,
) -> Tensor | tuple[Tensor, Tensor]:
    """The mix `[..., D]`, RMS-normed once more with `output_rms_weight`; the weights `[L, ...]`.

    K3's op attn_res where neither gradients nor weights are asked for, plain torch otherwise
    (whatever `checkpoint_level` says: autograd keeps the sources in float32). The op rounds the
    mix to the sources' dtype before the output norm.
    """
    if not residuals:
        raise ValueError("residuals is empty; pass at least one source")
    if checkpoint_level not in (0, 1):
        raise ValueError(f"checkpoint_level is {checkpoint_level}; use 0 or 1")
    shape, dtype = residuals[0].shape, residuals[0].dtype
    sources = [source.reshape(-1, shape[-1]) for source in residuals]
    query_D = query.flatten() * scale
    if return_weights or needs_grad(query, rms_weight, output_rms_weight, *sources):
        mixed_TD, weights_LT = _mix(query_D, sources, rms_weight, rms_eps)
    else:
        attn_res = op_for("attn_res", sources[0])
        mixed_TD = attn_res(sources, rms_weight, query_D.unsqueeze(0), eps=rms_eps)
        weights_LT = None
    if output_rms_weight is not None:
        mixed_TD = mixed_TD.to(math_dtype(mixed_TD))
        mixed_TD = mixed_TD * rms_scale(mixed_TD, rms_eps) * output_rms_weight.to(mixed_TD.dtype)
    mixed = mixed_TD.to(dtype).view(shape)
    if weights_LT is None:
        return mixed
    return mixed, weights_LT.view(len(sources), *shape[:-1])


def _mix(
    query_D: Tensor, sources: Sequence[Tensor], rms_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Source by source, without ever stacking them; the mix in the math dtype."""
    dtype = math_dtype(sources[0])
    key_D = query_D.to(dtype) * rms_weight.to(dtype)
    exact = [source.to(dtype) for source in sources]
    weights_LT = torch.stack([(x @ key_D) * rms_scale(x, eps)[:, 0] for x in exact]).softmax(0)
    mixed_TD = exact[0] * weights_LT[0].unsqueeze(1)
    for x, weight_T in zip(exact[1:], weights_LT[1:], strict=True):
        mixed_TD = torch.addcmul(mixed_TD, x, weight_T.unsqueeze(1))
    return mixed_TD, weights_LT


def naive_attnres(
    query: Tensor,
    residuals: Sequence[Tensor],
    rms_weight: Tensor,
    output_rms_weight: Tensor | None = None,
    rms_eps: float = 1e-6,
    scale: float = 1.0,
    return_weights: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The same by its formula, on the stacked sources in float32: for comparisons."""
    dtype = math_dtype(residuals[0])
    values = torch.stack(list(residuals)).to(dtype)
    width = values.shape[-1:]
    keys = F.rms_norm(values, width, rms_weight.flatten().to(dtype), rms_eps)
    weights = torch.softmax(keys @ (query.flatten().to(dtype) * scale), dim=0)
    mixed = (weights.unsqueeze(-1) * values).sum(0)
    if output_rms_weight is not None:
        mixed = F.rms_norm(mixed, width, output_rms_weight.to(dtype), rms_eps)
    mixed = mixed.to(residuals[0].dtype)
    return (mixed, weights) if return_weights else mixed
