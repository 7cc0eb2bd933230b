"""attn_res in plain torch: the mix in place, and a closed-form backward that keeps no products.

Scores are sums by halves, as `sum` makes them: a matrix product adds up in a row, and the error of
a score is that of every following layer.

With r_i the factor that normalises v_i, p_i = q . v_i (q = norm * proj), scores p_i r_i and their
softmax w: out = sum w_i v_i, dscore_i = w_i (dout . v_i - sum_j w_j dout . v_j) and
dv_i = w_i dout + dscore_i r_i (q - v_i p_i r_i^2 / D), dq = sum_i dscore_i r_i v_i.
T tokens, D model width, S sources.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from k3_core.ops.math import math_dtype, without_autocast
from k3_kernels.launch import needs_grad
from k3_kernels.once import refuse_second_derivative

MAX_STACKED = 2**14
"""Values of a source up to which a copy of all sources costs less than an op for each of them."""


def attn_res(values: Sequence[Tensor], norm_D: Tensor, proj_1D: Tensor, *, eps: float) -> Tensor:
    """Softmax over the sources of proj . RMSNorm(v_i), applied to the v_i; as the reference."""
    if not values:
        raise ValueError("attn_res needs at least one source")
    dtype = math_dtype(values[0])
    query_D = norm_D.to(dtype) * proj_1D.to(dtype).reshape(-1)
    if needs_grad(query_D, *values):
        result: Tensor = _AttnRes.apply(eps, query_D, *values)
        return result
    if values[0].numel() <= MAX_STACKED:
        return _on_stack(values, query_D, eps)
    return _forward(values, query_D, eps)[0]


def _on_stack(values: Sequence[Tensor], query_D: Tensor, eps: float) -> Tensor:
    """The mix of a few tokens, in as few ops as it takes; sources first."""
    with without_autocast(query_D):
        sources_STD = torch.stack(tuple(values)).to(query_D.dtype)
        products_ST = torch.linalg.vecdot(sources_STD, query_D)
        squares_ST = torch.linalg.vecdot(sources_STD, sources_STD)
        scales_ST = squares_ST.div_(query_D.shape[0]).add_(eps).rsqrt_()
        weights_ST = scales_ST.mul_(products_ST).softmax(0)
        mixed_TD = sources_STD.mul_(weights_ST.unsqueeze(-1)).sum(0)
    return mixed_TD.to(values[-1].dtype)


def _forward(values: Sequence[Tensor], query_D: Tensor, eps: float) -> tuple[Tensor, ...]:
    """The mix; then products with the query, normalising factors and weights, each [T, S]."""
    with without_autocast(query_D):
        sources = [value.to(query_D.dtype) for value in values]
        products = torch.stack([torch.linalg.vecdot(x, query_D) for x in sources], dim=-1)
        squares = torch.stack([torch.linalg.vecdot(x, x) for x in sources], dim=-1)
        scales = squares.div_(query_D.shape[0]).add_(eps).rsqrt_()
        weights = (products * scales).softmax(-1)
        mixed_TD = sources[0] * weights[:, :1]
        for number, x in enumerate(sources[1:], 1):
            mixed_TD.addcmul_(x, weights[:, number : number + 1])
    return mixed_TD.to(values[-1].dtype), products, scales, weights


class _AttnRes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, eps: float, query_D: Tensor, *values: Tensor) -> Tensor:
        mixed_TD, *parts = _forward(values, query_D, eps)
        ctx.save_for_backward(query_D, *parts, *values)
        return mixed_TD

    @staticmethod
    def backward(ctx: Any, d_out_TD: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("attn_res")
        query_D, products, scales, weights, *values = ctx.saved_tensors
        with torch.autocast(query_D.device.type, enabled=False):
            sources = [value.to(query_D.dtype) for value in values]
            d_out_TD = d_out_TD.to(query_D.dtype)
            d_weights = torch.stack([torch.linalg.vecdot(d_out_TD, x) for x in sources], dim=-1)
            mean = (weights * d_weights).sum(-1, keepdim=True)
            d_products = (d_weights - mean).mul_(weights).mul_(scales)
            shrink = (d_products * products).mul_(scales.square()).div_(-query_D.shape[0])
            d_query_D = torch.zeros_like(query_D)
            d_values = []
            for i, (x, value) in enumerate(zip(sources, values, strict=True)):
                d_query_D.addmv_(x.mT, d_products[:, i])
                d_x = torch.addr(d_out_TD * weights[:, i, None], d_products[:, i], query_D)
                d_values.append(d_x.addcmul_(x, shrink[:, i, None]).to(value.dtype))
        return None, d_query_D, *d_values
