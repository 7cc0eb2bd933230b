"""Inputs, peers and floors of the rows of benchmarks/kernels_ops.py.

A function `*_case(is_full, device, dtype)` draws a case: full size on a GPU, tiny for a dry run.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from k3_core.ops.attn_res.reference import attn_res as attn_res_torch
from k3_core.ops.gated_rms_norm.reference import gated_rms_norm as norm_torch
from k3_core.ops.latent_router.reference import latent_router as latent_torch
from k3_core.ops.mla_decode.reference import mla_decode as decode_torch
from k3_core.ops.moe_experts.reference import moe_experts as experts_torch
from k3_core.ops.mx_quantize.reference import mx_quantize as quantize_torch
from k3_core.ops.route_topk.reference import route_topk as route_torch
from k3_core.ops.situ_glu.reference import situ_glu as glu_torch
from k3_core.quant import MXTensor
from k3_core.testing import relative_error
from k3_kernels.attn_res import op as attn_res_op
from k3_kernels.attn_res.phases import attn_res_blocks, attn_res_merge
from k3_kernels.gated_rms_norm import op as norm_op
from k3_kernels.latent_router import op as latent_op
from k3_kernels.latent_router.torch_cuda import latent_router as latent_cuda
from k3_kernels.mla_decode import op as decode_op
from k3_kernels.mla_prefill import op as prefill_op
from k3_kernels.moe_experts import op as experts_op
from k3_kernels.moe_experts import products as experts_products
from k3_kernels.moe_experts.plan import make_plan
from k3_kernels.moe_experts.rows import gather_rows, make_padded_plan
from k3_kernels.mx_quantize import op as quantize_op
from k3_kernels.route_topk import op as route_op
from k3_kernels.short_conv import op as conv_op
from k3_kernels.short_conv.cpu import short_conv as conv_torch
from k3_kernels.situ_glu import op as glu_op

SITU = partial(glu_op.situ_glu, beta=4.0, linear_beta=25.0)


@dataclass
class Case:
    """calls: the same work on different copies of the inputs. error: of the first of them."""

    calls: list[Callable[[], object]]
    num_bytes: float
    error: Callable[[], float]
    num_flop: float = 0.0
    peer: Callable[[], object] | None = None
    peer_name: str = ""


def randn(*shape: int, device: str, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Random values; the data matters for the clocks."""
    return torch.randn(*shape, device=device, dtype=dtype) * scale


def attn_res_case(is_full: bool, device: str, dtype: torch.dtype, *, num_sources: int) -> Case:
    """The whole mix."""
    tokens, width = (8192, 7168) if is_full else (3, 48)
    like = {"device": device, "dtype": dtype}
    values = [randn(tokens, width, **like) for _ in range(num_sources)]
    weights = randn(width, **like), randn(1, width, **like, scale=0.05)
    few = [v[:64].double() for v in values]

    def error() -> float:
        expected = attn_res_torch(few, *weights, eps=1e-5)
        return relative_error(attn_res_op.attn_res(values, *weights, eps=1e-5)[:64], expected)

    return Case(
        [lambda: attn_res_op.attn_res(values, *weights, eps=1e-5)],
        (num_sources + 1) * values[0].nbytes,
        error,
        peer=lambda: attn_res_torch(values, *weights, eps=1e-5),
        peer_name="torch reference",
    )


def merge_case(is_full: bool, device: str, dtype: torch.dtype) -> Case:
    """Phase 2 at one site: running sum, merge, norm."""
    tokens, width = (8192, 7168) if is_full else (3, 48)
    like = {"device": device, "dtype": dtype}
    prefix, delta, blocks = (randn(tokens, width, **like) for _ in range(3))
    lse = torch.zeros(tokens, device=device)
    norm, proj = randn(width, **like), randn(1, width, **like, scale=0.05)
    call = partial(attn_res_merge, norm_D=norm, proj_1D=proj, out_norm_D=norm)
    named = {"eps": 1e-5, "out_eps": 1e-5}

    def error() -> float:
        own = prefix.clone()
        got, mix = call(own, delta, (blocks, lse), **named, return_mix=True)
        exact = mix.double()
        scaled = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + 1e-5)
        return relative_error(got, scaled * norm.double())

    return Case([lambda: call(prefix, delta, (blocks, lse), **named)], 5 * prefix.nbytes, error)


def blocks_case(is_full: bool, device: str, dtype: torch.dtype) -> Case:
    """Phase 1: 8 finished sources for the 24 sites of a block, at a decode batch."""
    tokens, width, sites, sources = (256, 7168, 24, 8) if is_full else (3, 48, 2, 3)
    values = [randn(tokens, width, device=device, dtype=dtype) for _ in range(sources)]
    queries = randn(sites, width, device=device, dtype=torch.float32, scale=0.05)

    def error() -> float:
        got, _ = attn_res_blocks(values, queries, eps=1e-5)
        one = torch.ones(1, width, device=device, dtype=torch.float64)
        exact = [v.double() for v in values]
        return relative_error(got[0], attn_res_torch(exact, queries[0].double(), one, eps=1e-5))

    return Case(
        [lambda: attn_res_blocks(values, queries, eps=1e-5)],
        (sources + sites) * values[0].nbytes,
        error,
    )


def conv_case(is_full: bool, device: str, dtype: torch.dtype, *, is_normed: bool) -> Case:
    """Width 4 and SiLU; normed: q and k of 3 x 32 heads of 128 divided by their norms as well."""
    tokens, channels, head = (8192, 12288, 128) if is_full else (9, 48, 16)
    x = randn(tokens, channels, device=device, dtype=dtype)
    weight = randn(channels, 1, 4, device=device, dtype=torch.float32, scale=0.5)
    cu = torch.tensor([0, tokens], device=device, dtype=torch.int32)
    named = {"cu_seqlens_N1": cu, "seqlens": (tokens,)}
    if is_normed:
        norm = {"head_dim": head, "num_norm_channels": channels // 3 * 2}
        call = partial(conv_op.short_conv_norm, x, weight, **named, **norm)
    else:
        call = partial(conv_op.short_conv, x, weight, **named)

    def error() -> float:
        got = call() if is_normed else call()[0]
        few = {"cu_seqlens_N1": torch.tensor([0, min(64, tokens)], device=device)}
        expected, _ = conv_torch(x[:64].double(), weight.double(), **few)
        if is_normed:
            heads = expected.unflatten(1, (-1, head))
            scale = torch.rsqrt(heads.square().sum(-1, keepdim=True) + 1e-6)
            scale[:, heads.shape[1] // 3 * 2 :] = 1.0
            expected = (heads * scale).flatten(1)
        return relative_error(got[:64], expected)

    peer = partial(conv_torch, x, weight, **named)
    return Case([call], 2 * x.nbytes, error, peer=peer, peer_name="short_conv.cpu (torch)")


def norm_case(is_full: bool, device: str, dtype: torch.dtype) -> Case:
    """The output norm of KDA."""
    shape = (8192, 96, 128) if is_full else (3, 2, 16)
    x, gate = (randn(*shape, device=device, dtype=dtype) for _ in range(2))
    weight = torch.ones(shape[-1], device=device)
    return Case(
        [lambda: norm_op.gated_rms_norm(x, weight, gate, eps=1e-5)],
        3 * x.nbytes,
        lambda: relative_error(
            norm_op.gated_rms_norm(x, weight, gate, eps=1e-5)[:64],
            norm_torch(x[:64].double(), weight, gate[:64].double(), eps=1e-5),
        ),
        peer=lambda: norm_torch(x, weight, gate, eps=1e-5),
        peer_name="torch reference",
    )


def glu_case(is_full: bool, device: str, dtype: torch.dtype) -> Case:
    """The shared experts' activation, halves of one projection."""
    rows, width = (8192, 12288) if is_full else (3, 64)
    gate, up = randn(rows, width, device=device, dtype=dtype).chunk(2, dim=1)
    return Case(
        [lambda: SITU(gate, up)],
        1.5 * gate.nbytes * 2,
        lambda: relative_error(
            SITU(gate, up)[:64],
            glu_torch(gate[:64].double(), up[:64].double(), beta=4.0, linear_beta=25.0),
        ),
        peer=lambda: glu_torch(gate, up, beta=4.0, linear_beta=25.0),
        peer_name="torch reference",
    )


def latent_case(
    is_full: bool,
    device: str,
    dtype: torch.dtype,
    *,
    tokens: int,
    full: tuple[int, int, int] = (7168, 3584, 896),
) -> Case:
    """Down-projection and router, `full` is (D, L, E); copies of the weights for few tokens, so
    that they are read."""
    width, latent, experts = full if is_full else (64, 32, 24)
    tokens = tokens if is_full else 5
    like = {"device": device, "dtype": dtype}
    x = randn(tokens, width, **like)
    weights = [
        [randn(n, width, **like, scale=width**-0.5) for n in (latent, experts)]
        for _ in range(4 if tokens < 1024 else 1)
    ]

    def error() -> float:
        got = latent_op.latent_router(x, *weights[0])
        exact = latent_torch(x[:64].double(), *(w.double() for w in weights[0]))
        return max(relative_error(a[:64], b) for a, b in zip(got, exact, strict=True))

    peer = latent_cuda if device == "cuda" else latent_torch
    return Case(
        [partial(latent_op.latent_router, x, *pair) for pair in weights],
        (latent + experts) * width * 2 + x.nbytes + tokens * (2 * latent + 4 * experts),
        error,
        2.0 * tokens * width * (latent + experts),
        peer=partial(peer, x, *weights[0]),
        peer_name="two torch products, 16-bit inputs",
    )


def route_case(is_full: bool, device: str, dtype: torch.dtype) -> Case:
    """Top-16 of 896; four copies, because one stays in the cache."""
    tokens, experts, top_k = (8192, 896, 16) if is_full else (3, 40, 4)
    logits = [randn(tokens, experts, device=device, dtype=torch.float32) for _ in range(4)]
    bias = 0.1 * torch.randn(experts, device=device)
    named = {"top_k": top_k, "renormalize": True, "scaling_factor": 1.0}

    def error() -> float:
        got = route_op.route_topk(logits[0], bias, **named)
        expected = route_torch(logits[0], bias, **named)
        # Reciprocals of sums of equal weights: an expert that differs shows as an error.
        own, other = (
            torch.zeros_like(logits[0]).scatter(1, r.idx_Tk, r.weight_Tk) for r in (got, expected)
        )
        return relative_error(own, other)

    return Case(
        [partial(route_op.route_topk, x, bias, **named) for x in logits],
        2 * logits[0].nbytes,
        error,
        peer=lambda: route_torch(logits[0], bias, **named),
        peer_name="torch sigmoid and topk",
    )


def _stacks(shape: tuple[int, int, int], device: str, dtype: torch.dtype, is_packed: bool) -> list:
    experts, inner, width = shape
    shapes = ((experts, inner, width), (experts, inner, width), (experts, width, inner))
    if not is_packed:
        return [randn(*s, device=device, dtype=dtype, scale=s[-1] ** -0.5) for s in shapes]
    stacks = []
    for e, out, columns in shapes:
        packed = torch.randint(256, (e, out, columns // 2), device=device, dtype=torch.uint8)
        scale = torch.randint(118, 123, (e, out, columns // 32), device=device, dtype=torch.uint8)
        stacks.append(MXTensor(packed, scale))
    return stacks


def experts_case(
    is_full: bool,
    device: str,
    dtype: torch.dtype,
    *,
    rows: int,
    is_packed: bool,
    is_whole: bool,
    full: tuple[int, int, int] = (112, 3072, 3584),
) -> Case:
    """E experts, width D -> 2 I (-> D with `is_whole`), hit evenly; `full` is (E, I, D)."""
    shape = full if is_full else (3, 32, 64)
    experts, inner, width = shape
    rows = rows if is_full else 5
    stacks = _stacks(shape, device, dtype, is_packed)
    x = randn(rows, width, device=device, dtype=dtype)
    idx = (torch.randperm(rows, device=device) % experts)[:, None]
    weight = torch.ones(rows, 1, device=device)

    def whole() -> Tensor:
        return experts_op.moe_experts(x, idx, weight, *stacks, activation=SITU)

    def up() -> Tensor:
        if not is_packed and experts_op.takes_padded_rows(x, rows, stacks[0]):
            most = experts_products.block_rows(x, inner, width)
            if most not in plans:
                plans[most] = make_padded_plan(idx, experts, most)
            rows_SD = gather_rows(x, plans[most])
            return experts_products.up_product(rows_SD, plans[most], *stacks[:2], (4.0, 25.0))
        most = experts_op.choose_tile(rows, stacks[0]).rows
        if most not in plans:
            plans[most] = make_plan(idx, experts, most)
        return experts_op.up_project(x, plans[most], 1, *stacks[:2], SITU, is_packed)

    plans: dict = {}
    hit = min(rows, experts)
    wide = 3 if is_whole else 2
    per_weight = 0.53125 if is_packed else 2.0
    num_bytes = wide * hit * inner * width * per_weight + rows * (width + wide * inner) * 2

    def error() -> float:
        few = slice(0, 4)
        exact = [w.dequantize(torch.float64) if is_packed and not is_full else w for w in stacks]
        expected = experts_torch(
            x[few].float(), idx[few], weight[few], *exact, activation=lambda g, u: SITU(g, u)
        )
        return relative_error(whole()[few], expected)

    case = Case([whole if is_whole else up], num_bytes, error, 2.0 * wide * rows * inner * width)
    if not is_whole and is_full and not is_packed:
        joined = torch.cat(stacks[:2], dim=1).mT
        counts = torch.bincount(idx.flatten(), minlength=experts)
        ends = counts.cumsum(0).to(torch.int32)
        order = idx.flatten().argsort()
        case.peer = lambda: F.grouped_mm(x[order], joined, offs=ends)
        case.peer_name = "torch grouped_mm, no activation"
    return case


def prefill_case(
    is_full: bool, device: str, dtype: torch.dtype, *, tokens: int, heads: int
) -> Case:
    """192/128 causal, float32 output."""
    tokens, heads, dims = (tokens, heads, (192, 128)) if is_full else (21, 2, (48, 32))
    q, k = (randn(tokens, heads, dims[0], device=device, dtype=dtype) for _ in range(2))
    v = randn(tokens, heads, dims[1], device=device, dtype=dtype)
    cu = torch.tensor([0, tokens], device=device, dtype=torch.int32)
    scale = dims[0] ** -0.5
    named = {"scale": scale, "cu_seqlens_q": cu, "cu_seqlens_k": cu}
    call = partial(prefill_op.mla_prefill, q, k, v, **named, out_dtype=torch.float32)
    batched = [x.transpose(0, 1)[None] for x in (q, k, v)]

    def sdpa() -> Tensor:
        return F.scaled_dot_product_attention(*batched, is_causal=True, scale=scale)

    def error() -> float:
        few = [x[:, :1].double() for x in (q, k, v)]
        batch = [x.transpose(0, 1)[None] for x in few]
        expected = F.scaled_dot_product_attention(*batch, is_causal=True, scale=scale)
        return relative_error(call()[:, :1], expected[0].transpose(0, 1))

    return Case(
        [call],
        q.nbytes + k.nbytes + v.nbytes + 2 * v.nbytes,
        error,
        tokens * tokens * heads * sum(dims),
        sdpa,
        "torch SDPA, bfloat16 output",
    )


def decode_case(
    is_full: bool,
    device: str,
    dtype: torch.dtype,
    *,
    rows: int,
    context: int,
    full: tuple[int, int, int] = (96, 512, 64),
) -> Case:
    """Pages of 64 tokens in random order, every row at full length; `full` is (H, C, R)."""
    heads, *dims = full if is_full else (3, 32, 16)
    page = 64 if is_full else 4
    rows, context = (rows, context) if is_full else (2, 10)
    per_row = -(-context // page)
    like = {"device": device, "dtype": dtype}
    pages = randn(rows * per_row, page, sum(dims), **like)
    table = torch.randperm(rows * per_row, device=device).view(rows, per_row).to(torch.int32)
    lengths = torch.full((rows,), context, device=device, dtype=torch.int32)
    args = randn(rows, heads, dims[0], **like), randn(rows, heads, dims[1], **like)
    call = partial(decode_op.mla_decode, *args, pages, table, lengths, scale=192**-0.5)

    def error() -> float:
        one = [x[:1].double() for x in args]
        own = pages[table[0]].double()
        order = torch.arange(per_row, device=device)[None]
        expected = decode_torch(*one, own, order, lengths[:1], scale=192**-0.5)
        return relative_error(call()[:1], expected)

    return Case(
        [call],
        rows * context * sum(dims) * 2,
        error,
        2.0 * rows * context * heads * (2 * dims[0] + dims[1]),
        partial(decode_torch, *args, pages, table.long(), lengths, scale=192**-0.5),
        "torch reference",
    )


def quantize_case(is_full: bool, device: str, dtype: torch.dtype) -> Case:
    """MXFP4 codes of one large weight."""
    w = randn(*((16384, 7168) if is_full else (3, 64)), device=device, dtype=dtype, scale=0.02)

    def error() -> float:
        got, expected = quantize_op.mx_quantize(w[:64]), quantize_torch(w[:64])
        return relative_error(got.dequantize(), expected.dequantize())

    return Case([lambda: quantize_op.mxfp4_codes(w)], w.nbytes * (1 + 0.265625), error)
