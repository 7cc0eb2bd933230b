"""Cases of latent_router, route_topk, moe_experts and mx_quantize (report 4).

T tokens, E experts, k routes a token, D width, I expert width.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from k3_core.ops.mx_quantize.reference import mx_quantize
from k3_core.ops.route_topk import Routes
from k3_core.ops.situ_glu.reference import situ_glu
from k3_core.testing.cases import Case
from k3_core.testing.values import Call, Values

# Router logits are float32 in every model (architecture 3.5).
FULL = (torch.float64, torch.float32)


def _latent(v: Values, tokens: int, width: int = 32, latent: int = 24, experts: int = 10) -> Call:
    weights = (v.act(rows, width, scale=width**-0.5) for rows in (latent, experts))
    return Call((v.act(tokens, width), *weights))


def _route(v: Values, tokens: int, experts: int, **named: Any) -> Call:
    logits, bias = v.full(tokens, experts), v.full(experts, scale=0.2)
    return Call((logits, bias), {"scaling_factor": 2.5, **named}, constants=(1,))


def _route_counted(v: Values, tokens: int, experts: int, **named: Any) -> Call:
    """With a histogram that holds counts already; few bins, so that rounding moves none."""
    call = _route(v, tokens, experts, **named)
    histogram, mask = v.integers(9, experts, 8).to(torch.int32), v.integers(4, tokens) > 0
    extras = {"histogram_EB": histogram, "is_counted_T": mask}
    return Call(call.args, {**call.kwargs, **extras}, (1,), ("histogram_EB",))


def _routes(output: Routes, call: Call) -> list[Tensor]:
    """Weights as a dense [T, E] matrix, because the order of a token's experts is free."""
    idx_Tk, weight_Tk, scores_TE, cutoff_T = output
    dense_TE = torch.zeros_like(scores_TE).scatter(1, idx_Tk, weight_Tk)
    chosen_TE = torch.zeros_like(scores_TE, dtype=torch.int64).scatter(1, idx_Tk, 1)
    return [dense_TE, chosen_TE, scores_TE, cutoff_T]


def _experts(
    v: Values,
    tokens: int,
    top_k: int,
    is_packed: bool = False,
    has_norm: bool = False,
    **named: bool,
) -> Call:
    experts, width, inner = 6, 32, 64
    shapes = ((experts, inner, width), (experts, inner, width), (experts, width, inner))
    weights: list[Any] = [v.act(*shape, scale=shape[-1] ** -0.5) for shape in shapes]
    if is_packed:
        weights = [mx_quantize(weight) for weight in weights]
    routes = v.distinct(experts, tokens, top_k), v.full(tokens, top_k).sigmoid()
    activation = partial(situ_glu, beta=4.0, linear_beta=25.0)
    named_all: dict[str, Any] = {"activation": activation, **named}
    if has_norm:
        named_all["norm"] = v.act(width, scale=0.2) + 1.0, 1e-5
    return Call((v.act(tokens, width), *routes, *weights), named_all)


def _weight(v: Values, shape: tuple[int, ...], scale: float) -> Call:
    return Call((v.act(*shape, scale=scale),))


def _packed(output: Any, call: Call) -> list[Tensor]:
    return [output.packed, output.scale]


CASES = [
    Case("latent_router", "rows", partial(_latent, tokens=17)),
    Case("latent_router", "one-token", partial(_latent, tokens=1)),
    Case("latent_router", "no-tokens", partial(_latent, tokens=0)),
    Case("latent_router", "odd-width", partial(_latent, tokens=5, width=21)),
    Case(
        "route_topk",
        "plain",
        partial(_route, tokens=21, experts=16, top_k=4, renormalize=True),
        dtypes=FULL,
        results=_routes,
    ),
    Case(
        "route_topk",
        "groups-softmax",
        partial(
            _route,
            tokens=9,
            experts=12,
            top_k=3,
            renormalize=False,
            num_groups=4,
            topk_groups=2,
            activation="softmax",
        ),
        dtypes=FULL,
        results=_routes,
    ),
    Case(
        "route_topk",
        "all-experts",
        partial(_route, tokens=5, experts=4, top_k=4, renormalize=True),
        dtypes=FULL,
        results=_routes,
    ),
    Case(
        "route_topk",
        "histogram",
        partial(_route_counted, tokens=21, experts=16, top_k=4, renormalize=True),
        dtypes=FULL,
        results=_routes,
    ),
    Case("moe_experts", "rows", partial(_experts, tokens=17, top_k=2)),
    Case("moe_experts", "one-token", partial(_experts, tokens=1, top_k=3)),
    Case("moe_experts", "no-tokens", partial(_experts, tokens=0, top_k=2)),
    Case("moe_experts", "norm", partial(_experts, tokens=7, top_k=2, has_norm=True)),
    Case(
        "moe_experts",
        "mxfp4",
        partial(_experts, tokens=17, top_k=2, is_packed=True),
        frozenset({"mxfp4"}),
    ),
    Case(
        "moe_experts",
        "quantized-training",
        partial(_experts, tokens=17, top_k=2, quantize_weights=True),
        frozenset({"mxfp4_training"}),
    ),
    Case("mx_quantize", "stack", partial(_weight, shape=(3, 5, 64), scale=0.02), results=_packed),
    Case("mx_quantize", "row", partial(_weight, shape=(96,), scale=3.0), results=_packed),
    Case("mx_quantize", "zeros", partial(_weight, shape=(2, 32), scale=0.0), results=_packed),
]
