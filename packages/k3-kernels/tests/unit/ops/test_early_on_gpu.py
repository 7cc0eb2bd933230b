"""Kernels that start before the one in front of them is done read what it wrote all the same."""

from functools import partial

import pytest
import torch

from k3_kernels import early
from k3_kernels.depth_read.op import depth_read
from k3_kernels.kda_decode.op import kda_decode
from k3_kernels.latent_router.op import latent_router
from k3_kernels.linear.op import linear
from k3_kernels.mla_decode.op import mla_decode
from k3_kernels.moe_experts import op as experts_op
from k3_kernels.rms_norm.op import rms_norm
from k3_kernels.route_topk.op import route_topk
from k3_kernels.situ_glu.op import situ_glu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not early.starts_early(torch.device("cuda")),
        reason="needs a CUDA device of capability 9.0",
    ),
]

WIDTH, EXPERTS, INNER, LATENT, HEADS, SHARED = 512, 480, 192, 256, 8, 64


def _layers(rows):
    """A chain of the kernels of a decode step but KDA's, from x [T, D] to as much."""
    generator = torch.Generator(device="cuda").manual_seed(0)

    def randn(*shape):
        values = torch.randn(*shape, generator=generator, device="cuda")
        return (values * shape[-1] ** -0.5).to(torch.bfloat16)

    down, gate, up = randn(LATENT, WIDTH), randn(EXPERTS, WIDTH), randn(WIDTH, LATENT)
    joined, back = randn(2 * INNER, WIDTH), randn(WIDTH, INNER)
    stacks = [randn(EXPERTS, *s) for s in ((INNER, LATENT), (INNER, LATENT), (LATENT, INNER))]
    norm, narrow, bias = randn(WIDTH) + 1, randn(LATENT) + 1, torch.zeros(EXPERTS, device="cuda")
    query, whole = randn(HEADS * (LATENT // 2 + SHARED), WIDTH), randn(WIDTH, HEADS * LATENT // 2)
    pages = randn(16, 64, LATENT // 2 + SHARED)
    table = torch.arange(4, device="cuda").expand(rows, 4)
    lengths = torch.full((rows,), 130, device="cuda")
    glu = partial(situ_glu, beta=4.0, linear_beta=25.0)

    def layer(x):
        h, total = depth_read([x, x], x, x, norm, norm[None], norm, eps=1e-5, out_eps=1e-5)
        q = linear(h, query).view(rows, HEADS, -1)
        q_latent, q_shared = q.split((LATENT // 2, SHARED), dim=-1)
        o = mla_decode(q_latent, q_shared, pages, table, lengths, scale=0.07)
        x = rms_norm(linear(o.flatten(1), whole, add_to=total), norm, eps=1e-5)
        shared = linear(glu(*linear(x, joined).chunk(2, dim=-1)), back)
        z, logits = latent_router(x, down, gate)
        routes = route_topk(logits, bias, top_k=8, renormalize=True, scaling_factor=1.0)
        chosen = routes.idx_Tk, routes.weight_Tk
        u = experts_op.moe_experts(z, *chosen, *stacks, activation=glu, norm=(narrow, 1e-5))
        return linear(u, up, add_to=shared)

    return layer


def _captured(layer, x):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        layer(layer(x))
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(layer(layer(x)))
    return graph, y


@pytest.mark.parametrize("limit", [0, experts_op.MAX_UNPLANNED])
@pytest.mark.parametrize("rows", [1, 3, 64])
@torch.inference_mode()
def test_a_graph_gives_the_bits_of_one_whose_kernels_wait(rows, limit, monkeypatch):
    monkeypatch.setattr(experts_op, "MAX_UNPLANNED", limit)
    x = torch.zeros(rows, WIDTH, device="cuda", dtype=torch.bfloat16)
    layer = _layers(rows)
    graph, y = _captured(layer, x)
    with monkeypatch.context() as patch:
        patch.setattr(early, "starts_early", lambda device: False)
        waiting, expected = _captured(layer, x)
    for _ in range(20):
        x.normal_()
        graph.replay()
        waiting.replay()
        assert expected.isfinite().all()
        assert torch.equal(y, expected)


@torch.inference_mode()
def test_states_move_by_the_same_bits(monkeypatch):
    # Back to back on the same states.
    generator = torch.Generator(device="cuda").manual_seed(0)
    rows, dim, like = 64, 128, {"generator": generator, "device": "cuda"}
    channels = 3 * HEADS * dim
    inputs = [
        torch.zeros(rows, 1, *shape, device="cuda", dtype=torch.bfloat16)
        for shape in ((channels,), (HEADS, dim), (HEADS,), (HEADS, dim))
    ]
    x, gate, beta, out_gate = inputs
    taps, decay = torch.randn(channels, 1, 4, **like), torch.zeros(HEADS, device="cuda")
    bias, norm = torch.randn(HEADS, dim, **like), torch.ones(dim, device="cuda")
    slots = torch.randperm(rows + 1, **like)[:rows]

    def pools():
        state = torch.zeros(rows + 1, HEADS, dim, dim, device="cuda")
        window = torch.zeros(rows + 1, channels, 3, device="cuda", dtype=torch.bfloat16)
        return {"state_SHVK": state, "window_SCR": window, "slots_B": slots}

    def twice(own):
        args = (taps, gate, beta, decay, bias, out_gate, norm)

        def layer(y):
            z = x + 0.1 * y.flatten(2).repeat(1, 1, 3)
            first = kda_decode(z, *args, **own, lower_bound=-5.0, eps=1e-5)
            return first + kda_decode(z, *args, **own, lower_bound=-5.0, eps=1e-5)

        return layer

    early_pools, waiting_pools = pools(), pools()
    graph, y = _captured(twice(early_pools), out_gate)
    with monkeypatch.context() as patch:
        patch.setattr(early, "starts_early", lambda device: False)
        waiting, expected = _captured(twice(waiting_pools), out_gate)
    for own in (early_pools, waiting_pools):
        own["state_SHVK"].zero_()
        own["window_SCR"].zero_()
    for _ in range(20):
        for values in inputs:
            values.normal_()
        graph.replay()
        waiting.replay()
        assert expected.isfinite().all()
        assert torch.equal(y, expected)
        assert torch.equal(early_pools["state_SHVK"], waiting_pools["state_SHVK"])
