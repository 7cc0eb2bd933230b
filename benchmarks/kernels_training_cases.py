"""Forward and backward together of ops beside the large products, for benchmarks/kernels_ops.py.

The error is the largest of all gradients and results against float64 on the first tokens, and the
peer is what these ops ran in training before: closed forms or autograd in plain torch.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from kernels_ops_cases import SITU, Case, randn
from torch import Tensor
from torch.nn import functional as F

from k3_core.ops.attn_res.reference import attn_res as attn_res_exact
from k3_core.ops.depth_read.reference import depth_read as depth_exact
from k3_core.ops.gated_rms_norm.reference import gated_rms_norm as gated_exact
from k3_core.ops.mla_prefill.reference import mla_prefill as prefill_exact
from k3_core.ops.moe_experts.reference import moe_experts as experts_exact
from k3_core.ops.rms_norm.reference import rms_norm as norm_exact
from k3_core.ops.short_conv.reference import short_conv as conv_exact
from k3_core.ops.situ_glu.reference import situ_glu as glu_exact
from k3_core.testing import relative_error
from k3_kernels.attn_res import cpu as attn_res_cpu
from k3_kernels.attn_res import op as attn_res_op
from k3_kernels.depth_read import cpu as depth_cpu
from k3_kernels.depth_read import op as depth_op
from k3_kernels.gated_rms_norm import op as gated_op
from k3_kernels.mla_prefill import op as prefill_op
from k3_kernels.moe_experts import op as experts_op
from k3_kernels.moe_experts import torch_cuda as experts_torch
from k3_kernels.rms_norm import op as norm_op
from k3_kernels.short_conv import cpu as conv_cpu
from k3_kernels.short_conv import op as conv_op
from k3_kernels.situ_glu import op as glu_op

FEW = 512
"""Tokens whose gradients are compared."""

Run = Callable[..., Sequence[Tensor]]


def gradients(run: Run, inputs: Sequence[Tensor], d_results: Sequence[Tensor]) -> list[Tensor]:
    """Results and gradients."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    results = run(*leaves)
    return [*results, *torch.autograd.grad(results, leaves, d_results)]


def training_case(
    run: Run, exact: Run, peer: Run, inputs: Sequence[Tensor], tokens: int, num_bytes: float
) -> Case:
    """Inputs whose first axis is `tokens` long are cut for the error."""

    with torch.no_grad():
        d_results = [torch.randn_like(result) for result in run(*inputs)]

    def error() -> float:
        both = inputs, d_results
        few = [[x[:FEW] if x.dim() > 1 and len(x) == tokens else x for x in part] for part in both]
        got = gradients(run, *few)
        expected = gradients(exact, *([x.double() for x in part] for part in few))
        return max(relative_error(a, b) for a, b in zip(got, expected, strict=True))

    return Case(
        [partial(gradients, run, inputs, d_results)],
        num_bytes,
        error,
        peer=partial(gradients, peer, inputs, d_results),
        peer_name="plain torch",
    )


def conv_training_case(
    is_full: bool, device: str, dtype: torch.dtype, *, lengths: tuple[int, ...] = (8192,)
) -> Case:
    """Width 4 and SiLU over one or more sequences; the error is of one."""
    channels = 12288 if is_full else 48
    tokens = sum(lengths) if is_full else 9
    x = randn(tokens, channels, device=device, dtype=dtype)
    weight = randn(channels, 1, 4, device=device, dtype=torch.float32, scale=0.5)
    ends = torch.tensor((0, *lengths)).cumsum(0) if is_full else torch.tensor([0, 4, tokens])
    offsets = ends.to(device, torch.int32)

    def on(function: Callable[..., tuple]) -> Run:
        def run(x: Tensor, weight: Tensor) -> Sequence[Tensor]:
            cu = offsets.clamp(max=len(x))
            return function(x, weight, cu_seqlens_N1=cu)[:1]

        return run

    # x, y; x, dy, dx
    runs = on(conv_op.short_conv), on(conv_exact), on(conv_cpu.short_conv)
    return training_case(*runs, (x, weight), tokens, 5 * x.nbytes)


def mix_training_case(
    is_full: bool, device: str, dtype: torch.dtype, *, num_sources: int, is_read: bool
) -> Case:
    """The mix, or all of depth_read with an output that is added and a gradient of the sum."""
    tokens, width = (8192, 7168) if is_full else (9, 48)
    like = {"device": device, "dtype": dtype}
    # Multiples of 1/16: their sum needs no rounding, which the reference does not do.
    values = [
        randn(tokens, width, **like).mul_(16).round_().div_(16)
        for _ in range(num_sources + is_read)
    ]
    norms = [1 + randn(width, **like, scale=0.1) for _ in range(1 + is_read)]
    proj = randn(1, width, **like, scale=0.05)

    def mixed(function: Callable[..., Tensor]) -> Run:
        return lambda norm, proj, *values: [function(values, norm, proj, eps=1e-5)]

    def read(function: Callable[..., tuple]) -> Run:
        def run(norm: Tensor, out_norm: Tensor, proj: Tensor, *values: Tensor) -> Sequence[Tensor]:
            weights, eps = (norm, proj, out_norm), {"eps": 1e-5, "out_eps": 1e-5}
            return function(values[:-2], *values[-2:], *weights, **eps)

        return run

    if is_read:
        runs = read(depth_op.depth_read), read(depth_exact), read(depth_cpu.depth_read)
    else:
        runs = mixed(attn_res_op.attn_res), mixed(attn_res_exact), mixed(attn_res_cpu.attn_res)
    # Sources and out; sources, dout, gradients. The sum: two reads, one write; its gradient.
    num_rows = 3 * num_sources + 2 + 3 * is_read
    return training_case(*runs, (*norms, proj, *values), tokens, num_rows * values[0].nbytes)


def norm_training_case(is_full: bool, device: str, dtype: torch.dtype, *, is_gated: bool) -> Case:
    """The gated norm of 96 heads, or the norm before a sublayer."""
    tokens = 8192 if is_full else 9
    shape = (tokens, *((96, 128) if is_full else (3, 16)))
    x, gate = (randn(*shape, device=device, dtype=dtype) for _ in range(2))
    if is_gated:
        weight = 1 + randn(shape[-1], device=device, dtype=torch.float32, scale=0.1)
        runs = [
            partial(lambda f, *args: [f(*args, eps=1e-5)], function)
            for function in (gated_op.gated_rms_norm, gated_exact, gated_exact)
        ]
        return training_case(*runs, (x, weight, gate), tokens, 8 * x.nbytes)
    x = x.flatten(1)[:, : 7168 if is_full else None].contiguous()
    weight = 1 + randn(x.shape[1], device=device, dtype=dtype, scale=0.1)
    runs = [
        partial(lambda f, *args: [f(*args, eps=1e-5)], function)
        for function in (norm_op.rms_norm, norm_exact, norm_exact)
    ]
    return training_case(*runs, (x, weight), tokens, 5 * x.nbytes)


def glu_training_case(is_full: bool, device: str, dtype: torch.dtype) -> Case:
    """The shared experts' activation, halves of one projection."""
    rows, width = (8192, 12288) if is_full else (9, 64)
    gate, up = randn(rows, width, device=device, dtype=dtype).chunk(2, dim=1)
    runs = [
        partial(lambda f, *args: [f(*args, beta=4.0, linear_beta=25.0)], function)
        for function in (glu_op.situ_glu, glu_exact, glu_exact)
    ]
    return training_case(*runs, (gate, up), rows, 8 * gate.nbytes)


def prefill_training_case(
    is_full: bool, device: str, dtype: torch.dtype, *, lengths: tuple[int, ...] = (8192,)
) -> Case:
    """192/128 causal over packed sequences, float32 output; the peer takes them as one."""
    tokens = sum(lengths) if is_full else 21
    heads, dims = (96, (192, 128)) if is_full else (2, (48, 32))
    like = {"device": device, "dtype": dtype}
    inputs = [randn(tokens, heads, dim, **like) for dim in (dims[0], *dims)]
    ends = torch.tensor((0, *lengths)).cumsum(0) if is_full else torch.tensor([0, 8, tokens])
    offsets, scale = ends.to(device, torch.int32), dims[0] ** -0.5

    def on(function: Callable[..., Tensor]) -> Run:
        def run(q: Tensor, k: Tensor, v: Tensor) -> Sequence[Tensor]:
            cu = offsets.clamp(max=len(q))
            named = {"scale": scale, "cu_seqlens_q": cu, "cu_seqlens_k": cu}
            dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
            return [function(q, k, v, **named, out_dtype=dtype)]

        return run

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Sequence[Tensor]:
        batched = [x.transpose(0, 1)[None] for x in (q, k, v)]
        return [F.scaled_dot_product_attention(*batched, is_causal=True, scale=scale)]

    d_rounded = randn(1, heads, tokens, dims[1], **like)
    num_bytes = 2 * sum(x.nbytes for x in inputs) + 16 * inputs[2].numel()
    case = training_case(
        on(prefill_op.mla_prefill), on(prefill_exact), sdpa, inputs, tokens, num_bytes
    )
    case.peer = partial(gradients, sdpa, inputs, [d_rounded])
    case.peer_name = "torch SDPA, bfloat16 output"
    # The forward's two products and five of the backward, over the pairs of causal sequences.
    pairs = sum(n * (n + 1) // 2 for n in lengths)
    case.num_flop = 2 * pairs * heads * (4 * dims[0] + 3 * dims[1])
    return case


def experts_training_case(
    is_full: bool,
    device: str,
    dtype: torch.dtype,
    *,
    rows: int = 32768,
    top_k: int = 1,
    is_quantized: bool = False,
) -> Case:
    """112 experts, hit evenly; the error is of a few of them. FLOP without what is made again."""
    experts, inner, width = (112, 3072, 3584) if is_full else (6, 64, 32)
    tokens = rows // top_k if is_full else 9
    like = {"device": device, "dtype": dtype}
    shapes = ((experts, inner, width), (experts, inner, width), (experts, width, inner))
    inputs = [
        randn(tokens, width, **like),
        torch.rand(tokens, top_k, device=device),
        *(randn(*shape, **like, scale=shape[-1] ** -0.5) for shape in shapes),
    ]
    mixed = torch.randperm(tokens, device=device)[:, None] * top_k
    idx = (mixed + torch.arange(top_k, device=device)) % experts
    d_out = randn(tokens, width, **like)
    named = {"quantize_weights": is_quantized, "quantize_activations": is_quantized}

    def results(function: Callable[..., Tensor], parts: Sequence[Tensor]) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in parts[:5]]
        situ = partial(glu_exact, beta=4.0, linear_beta=25.0) if function is experts_exact else SITU
        out = function(leaves[0], parts[5], *leaves[1:], activation=situ, **named)
        return [out, *torch.autograd.grad(out, leaves, parts[6])]

    def error() -> float:
        few = [inputs[0][:FEW], inputs[1][:FEW, :2], *(w[:4] for w in inputs[2:])]
        few += [idx[:FEW, :2] % 3 + torch.arange(2, device=device)[:top_k], d_out[:FEW]]
        got = results(experts_op.moe_experts, few)
        expected = results(experts_exact, [x.double() if x.is_floating_point() else x for x in few])
        return max(relative_error(a, b) for a, b in zip(got, expected, strict=True))

    every = [*inputs, idx, d_out]
    is_torch = is_full and dtype == torch.bfloat16
    # Weights read three times and their gradients written.
    num_bytes = 4.0 * sum(w.nbytes for w in inputs[2:])
    return Case(
        [partial(results, experts_op.moe_experts, every)],
        num_bytes,
        error,
        18.0 * rows * inner * width,
        peer=partial(results, experts_torch.moe_experts, every) if is_torch else None,
        peer_name="torch grouped_mm",
    )
