"""The shapes of `k3 kernels bench`: one call of each op and variation, by device.

The sizes of a CPU are those of a model of some 100 million parameters, so that all ops together
take about a minute on two cores; those of a GPU are a sixth of the model K3's.
benchmarks/kernels.py has the shapes of public figures.
T tokens, H heads, D head dim, W model width, E experts, k routes a token, B rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from k3_core.ops.mx_quantize.reference import mx_quantize
from k3_core.ops.situ_glu.reference import situ_glu
from k3_core.testing import Case
from k3_core.testing.values import Call, Values


@dataclass(frozen=True)
class Sizes:
    """Dimensions of the calls on one kind of device."""

    tokens: int
    heads: int
    head_dim: int
    width: int
    sources: int
    experts: int
    top_k: int
    expert_width: int
    rows: int
    context: int
    latent: int
    shared: int
    vocabulary: int


SIZES = {
    "cpu": Sizes(
        tokens=512,
        heads=8,
        head_dim=64,
        width=512,
        sources=5,
        experts=32,
        top_k=4,
        expert_width=128,
        rows=8,
        context=1024,
        latent=128,
        shared=32,
        vocabulary=4096,
    ),
    "cuda": Sizes(
        tokens=2048,
        heads=16,
        head_dim=128,
        width=2048,
        sources=9,
        experts=128,
        top_k=16,
        expert_width=512,
        rows=64,
        context=4096,
        latent=512,
        shared=64,
        vocabulary=32768,
    ),
}

PAGE = 64
"""Tokens of a page of the latent cache."""


def bench_cases(device: str, op: str | None = None, sizes: Sizes | None = None) -> list[Case]:
    """The calls to time on "cpu" or "cuda", of one op or of all."""
    s = sizes or SIZES[device]
    cases = [
        Case("kda_chunk", "one-sequence", partial(_chunk, s, lengths=(s.tokens,))),
        Case("kda_chunk", "packed", partial(_chunk, s, lengths=(s.tokens // 4,) * 4)),
        Case("kda_segment", "four-stretches", partial(_segment, s)),
        Case("kda_step", "one-row", partial(_step, s, rows=1, tokens=1)),
        Case("kda_step", "rows", partial(_step, s, rows=s.rows, tokens=1)),
        Case("kda_step", "verify", partial(_step, s, rows=s.rows, tokens=4)),
        Case("kda_decode", "one-row", partial(_layer_decode, s, rows=1)),
        Case("kda_decode", "rows", partial(_layer_decode, s, rows=s.rows)),
        Case("kda_replay", "rows", partial(_replay, s, rows=4 * s.rows)),
        Case("short_conv", "prefill", partial(_conv, s, lengths=(s.tokens // 4,) * 4)),
        Case("short_conv", "decode", partial(_conv, s, lengths=(1,) * s.rows)),
        Case("rms_norm", "prefill", partial(_plain_norm, s, rows=s.tokens)),
        Case("rms_norm", "decode", partial(_plain_norm, s, rows=s.rows)),
        Case("gated_rms_norm", "prefill", partial(_norm, s, tokens=s.tokens)),
        Case("gated_rms_norm", "decode", partial(_norm, s, tokens=s.rows)),
        Case("attn_res", "prefill", partial(_mix, s, tokens=s.tokens)),
        Case("attn_res", "decode", partial(_mix, s, tokens=s.rows)),
        Case("depth_read", "prefill", partial(_read, s, tokens=s.tokens)),
        Case("depth_read", "decode", partial(_read, s, tokens=s.rows)),
        Case("situ_glu", "prefill", partial(_glu, s, rows=s.tokens * s.top_k)),
        Case("situ_glu", "decode", partial(_glu, s, rows=s.rows * s.top_k)),
        Case("linear", "one-row", partial(_product, s, rows=1)),
        Case("linear", "rows", partial(_product, s, rows=s.rows)),
        Case("latent_router", "prefill", partial(_latent, s, tokens=s.tokens)),
        Case("latent_router", "decode", partial(_latent, s, tokens=s.rows)),
        Case("route_topk", "prefill", partial(_route, s, tokens=s.tokens), results=_by_expert),
        Case("route_topk", "decode", partial(_route, s, tokens=s.rows), results=_by_expert),
        Case("moe_experts", "prefill", partial(_experts, s, tokens=s.tokens)),
        Case("moe_experts", "mxfp4-decode", partial(_experts, s, tokens=s.rows, is_packed=True)),
        Case("mla_prefill", "one-sequence", partial(_prefill, s, queries=s.tokens)),
        Case("mla_prefill", "with-past", partial(_prefill, s, queries=s.tokens // 4)),
        Case("mla_decode", "one-row", partial(_decode, s, lengths=(s.context,))),
        Case("mla_decode", "rows", partial(_decode, s, lengths=_spread(s))),
        Case("gated_mla_decode", "rows", partial(_gated_decode, s, lengths=_spread(s))),
        Case("mx_quantize", "experts", partial(_weights, s), results=_packed),
        Case("newton_schulz", "heads", partial(_matrices, s)),
        Case("linear_cross_entropy", "mean", partial(_loss, s)),
    ]
    return [case for case in cases if op in (None, case.op)]


def _inputs(v: Values, s: Sizes, *lead: int) -> tuple[Tensor, ...]:
    """q, k, v, gate, beta, A_log and dt_bias; gates about as slow as those of a new layer."""
    heads = (*lead, s.heads, s.head_dim)
    return (
        *(v.act(*heads) for _ in range(4)),
        v.act(*lead, s.heads),
        v.full(s.heads, scale=0.3),
        v.full(s.heads, s.head_dim, shift=-4.0),
    )


def _packing(v: Values, lengths: tuple[int, ...]) -> dict[str, Any]:
    return {"cu_seqlens_N1": v.offsets(lengths), "seqlens": lengths}


def _chunk(s: Sizes, v: Values, lengths: tuple[int, ...]) -> Call:
    state = v.full(len(lengths), s.heads, s.head_dim, s.head_dim)
    named = {"initial_state_NHVK": state, "output_final_state": True, "lower_bound": -5.0}
    return Call(_inputs(v, s, sum(lengths)), {**named, **_packing(v, lengths)})


def _segment(s: Sizes, v: Values) -> Call:
    inputs, lengths = _inputs(v, s, s.tokens)[1:], (s.tokens // 4,) * 4
    return Call(inputs, {"lower_bound": -5.0, **_packing(v, lengths)})


def _pool(s: Sizes, v: Values, rows: int) -> dict[str, Any]:
    """States of twice as many slots as rows, of which the rows use distinct ones."""
    state = v.full(2 * rows, s.heads, s.head_dim, s.head_dim)
    return {"state_SHVK": state, "slots_B": v.distinct(2 * rows, 1, rows)[0], "lower_bound": -5.0}


def _step(s: Sizes, v: Values, rows: int, tokens: int) -> Call:
    named = _pool(s, v, rows)
    if tokens > 1:
        named["num_commit_B"] = v.integers(tokens + 1, rows)
    return Call(_inputs(v, s, rows, tokens), named, mutated=("state_SHVK",))


def _layer_decode(s: Sizes, v: Values, rows: int) -> Call:
    channels = 3 * s.heads * s.head_dim
    _, _, out_gate, *decay = _inputs(v, s, rows, 1)
    named = {**_pool(s, v, rows), "window_SCR": v.act(2 * rows, channels, 3), "eps": 1e-5}
    args = (v.act(rows, 1, channels), v.act(channels, 1, 4), *decay, out_gate)
    return Call((*args, v.full(s.head_dim, shift=1.0)), named, mutated=("state_SHVK", "window_SCR"))


def _replay(s: Sizes, v: Values, rows: int) -> Call:
    tokens = 4
    _, k, _, gate, _, A_log, dt_bias = _inputs(v, s, rows, tokens)
    writes = v.full(rows, tokens, s.heads, s.head_dim)
    named = {**_pool(s, v, rows), "num_accepted_B": v.integers(tokens + 1, rows)}
    return Call((k, gate, writes, A_log, dt_bias), named, mutated=("state_SHVK",))


def _conv(s: Sizes, v: Values, lengths: tuple[int, ...]) -> Call:
    channels = 3 * s.heads * s.head_dim
    args = v.act(sum(lengths), channels), v.full(channels, 1, 4)
    state = v.act(len(lengths), channels, 3)
    named = {"initial_state_NCW": state, "output_final_state": True}
    return Call(args, {**named, **_packing(v, lengths)})


def _plain_norm(s: Sizes, v: Values, rows: int) -> Call:
    return Call((v.act(rows, s.width), v.act(s.width) + 1.0), {"eps": 1e-6})


def _norm(s: Sizes, v: Values, tokens: int) -> Call:
    shape = (tokens, s.heads, s.head_dim)
    return Call((v.act(*shape), v.full(s.head_dim, shift=1.0), v.act(*shape)), {"eps": 1e-6})


def _mix(s: Sizes, v: Values, tokens: int) -> Call:
    values = [v.act(tokens, s.width) for _ in range(s.sources)]
    return Call((values, v.act(s.width) + 1.0, v.act(1, s.width, scale=0.1)), {"eps": 1e-6})


def _read(s: Sizes, v: Values, tokens: int) -> Call:
    values, norm, proj = _mix(s, v, tokens).args
    added, out_norm = v.act(tokens, s.width), v.act(s.width) + 1.0
    args = (values[:-1], values[-1], added, norm, proj, out_norm)
    return Call(args, {"eps": 1e-6, "out_eps": 1e-5})


def _glu(s: Sizes, v: Values, rows: int) -> Call:
    shape = (rows, s.expert_width)
    return Call((v.act(*shape), v.act(*shape)), {"beta": 4.0, "linear_beta": 25.0})


def _product(s: Sizes, v: Values, rows: int) -> Call:
    """From the model's width to as much."""
    return Call((v.act(rows, s.width), v.act(s.width, s.width, scale=s.width**-0.5)))


def _latent(s: Sizes, v: Values, tokens: int) -> Call:
    """The latent of the experts is half as wide as the model."""
    shapes = (s.width // 2, s.width), (s.experts, s.width)
    weights = (v.act(*shape, scale=s.width**-0.5) for shape in shapes)
    return Call((v.act(tokens, s.width), *weights))


def _route(s: Sizes, v: Values, tokens: int) -> Call:
    named = {"top_k": s.top_k, "renormalize": True, "scaling_factor": 2.5}
    args = v.full(tokens, s.experts), v.full(s.experts, scale=0.2)
    return Call(args, named, constants=(1,))


def _by_expert(output: Any, call: Call) -> list[Tensor]:
    """Routes in the order of the experts' ids: that of a token's experts is free."""
    idx_Tk, order_Tk = output[0].sort(-1)
    return [idx_Tk, output[1].gather(-1, order_Tk), output[2], output[3]]


def _experts(s: Sizes, v: Values, tokens: int, is_packed: bool = False) -> Call:
    up, down = (s.experts, s.expert_width, s.width), (s.experts, s.width, s.expert_width)
    weights: list[Any] = [v.act(*shape, scale=shape[-1] ** -0.5) for shape in (up, up, down)]
    if is_packed:
        weights = [mx_quantize(weight) for weight in weights]
    routes = v.distinct(s.experts, tokens, s.top_k), v.full(tokens, s.top_k).sigmoid()
    activation = partial(situ_glu, beta=4.0, linear_beta=25.0)
    return Call((v.act(tokens, s.width), *routes, *weights), {"activation": activation})


def _prefill(s: Sizes, v: Values, queries: int) -> Call:
    """Queries are the last of `tokens` keys; keys are half as wide again as values."""
    wide = s.head_dim * 3 // 2
    args = (
        v.act(queries, s.heads, wide),
        v.act(s.tokens, s.heads, wide),
        v.act(s.tokens, s.heads, s.head_dim),
    )
    named: dict[str, Any] = {"scale": wide**-0.5}
    for name, length in (("q", queries), ("k", s.tokens)):
        named |= {f"cu_seqlens_{name}": v.offsets((length,)), f"seqlens_{name}": (length,)}
    return Call(args, named)


def _spread(s: Sizes) -> tuple[int, ...]:
    """Context lengths of the rows, from short to full."""
    return tuple(s.context * (row + 1) // s.rows for row in range(s.rows))


def _decode(s: Sizes, v: Values, lengths: Sequence[int]) -> Call:
    rows, per_row = len(lengths), s.context // PAGE
    pages = rows * per_row
    args = (
        v.act(rows, s.heads, s.latent),
        v.act(rows, s.heads, s.shared),
        v.act(pages, PAGE, s.latent + s.shared),
        v.distinct(pages, 1, pages).view(rows, per_row),
        torch.tensor(lengths, device=v.device),
    )
    return Call(args, {"scale": (s.latent + s.shared) ** -0.5})


def _gated_decode(s: Sizes, v: Values, lengths: Sequence[int]) -> Call:
    """Queries of twice the latent's rank; nope and value dims as wide as a head of KDA."""
    rank, rows = 2 * s.latent, len(lengths)
    _, _, pages, table, counts = _decode(s, v, lengths).args
    args = (
        v.act(rows, rank),
        v.act(rows, s.latent + s.shared),
        v.act(rows, s.heads, s.head_dim),
        v.act(rank, scale=0.3),
        v.act(s.heads, s.head_dim + s.shared, rank, scale=rank**-0.5),
        v.act(s.latent, scale=0.3),
        v.act(s.heads, 2 * s.head_dim, s.latent, scale=s.latent**-0.5),
    )
    named = {"pages_PLX": pages, "page_table_BM": table, "lengths_B": counts}
    scale = (s.head_dim + s.shared) ** -0.5
    return Call(args, {**named, "scale": scale, "eps": 1e-5}, mutated=("pages_PLX",))


def _weights(s: Sizes, v: Values) -> Call:
    return Call((v.act(s.experts, s.expert_width, s.width, scale=0.02),))


def _packed(output: Any, call: Call) -> list[Tensor]:
    return [output.packed, output.scale]


def _matrices(s: Sizes, v: Values) -> Call:
    return Call((v.act(s.heads, s.head_dim, s.width),))


def _loss(s: Sizes, v: Values) -> Call:
    hidden, weight = v.act(s.tokens, s.width), v.act(s.vocabulary, s.width, scale=s.width**-0.5)
    return Call((hidden, weight, v.integers(s.vocabulary, s.tokens)))
