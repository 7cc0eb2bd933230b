"""Backwards in bfloat16 at released widths, which only a GPU computes: errors, bits, capture."""

from functools import partial

import pytest
import torch

from k3_core.ops.attn_res.reference import attn_res as mix_reference
from k3_core.ops.depth_read.reference import depth_read as read_reference
from k3_core.ops.gated_rms_norm.reference import gated_rms_norm as gated_reference
from k3_core.ops.moe_experts.reference import moe_experts as experts_reference
from k3_core.ops.rms_norm.reference import rms_norm as norm_reference
from k3_core.ops.short_conv.reference import short_conv as conv_reference
from k3_core.ops.situ_glu.reference import situ_glu as glu_reference
from k3_core.testing import relative_error
from k3_kernels.attn_res.op import attn_res
from k3_kernels.depth_read.op import depth_read
from k3_kernels.gated_rms_norm.op import gated_rms_norm
from k3_kernels.kda_chunk.cpu import kda_chunk as kda_oracle
from k3_kernels.kda_chunk.forward import Saves
from k3_kernels.kda_chunk.op import kda_chunk
from k3_kernels.kda_segment.cpu import kda_segment as segment_oracle
from k3_kernels.kda_segment.op import kda_segment
from k3_kernels.moe_experts.op import moe_experts
from k3_kernels.rms_norm.op import rms_norm
from k3_kernels.short_conv.op import short_conv
from k3_kernels.situ_glu.op import situ_glu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LENGTHS = (1500, 1, 0, 2, 700, 3, 1030)


def _conv(function, x, weight, state):
    cu = torch.tensor((0, *LENGTHS)).cumsum(0).to(x.device, torch.int32, non_blocking=True)
    named = {"initial_state_NCW": state, "output_final_state": True}
    if function is conv_reference:
        named["seqlens"] = LENGTHS
    return function(x, weight, cu_seqlens_N1=cu, **named)


def _mix(function, norm, proj, *values):
    return function(values, norm, proj, eps=1e-5)


def _read(function, norm, proj, out_norm, *values):
    weights = norm, proj, out_norm
    return function(values[:-2], *values[-2:], *weights, eps=1e-5, out_eps=1e-5)


def _norm(function, *args):
    return function(*args, eps=1e-5)


def _glu(function, *args):
    return function(*args, beta=4.0, linear_beta=25.0)


def _experts(function, x, weight, *stacks):
    # Expert 3 gets no row. Divided by 32, drawn stacks keep the size of rows.
    token = torch.arange(len(x), device=x.device)[:, None]
    idx = (token * token + torch.arange(2, device=x.device)) % 3
    stacks = [w / 32 for w in stacks]
    return function(x, idx, weight, *stacks, activation=partial(glu_reference, **SITU))


SITU = {"beta": 4.0, "linear_beta": 25.0}
ROW = (301, 7168)
EXPERTS = ((500, 1536), (500, 2), (4, 1024, 1536), (4, 1024, 1536), (4, 1536, 1024))
NARROW = ((500, 200), (500, 2), (4, 104, 200), (4, 104, 200), (4, 200, 104))
CASES = {
    "conv": (_conv, short_conv, conv_reference, ((sum(LENGTHS), 1544), (1544, 1, 4), (7, 1544, 3))),
    "mix": (_mix, attn_res, mix_reference, (ROW[1:], (1, ROW[1]), *[ROW] * 9)),
    "read": (_read, depth_read, read_reference, (ROW[1:], (1, ROW[1]), ROW[1:], *[ROW] * 10)),
    "norm": (_norm, rms_norm, norm_reference, ((1001, 7168), (7168,))),
    "gated": (_norm, gated_rms_norm, gated_reference, ((99, 96, 128), (128,), (99, 96, 128))),
    "experts": (_experts, moe_experts, experts_reference, EXPERTS),
    "narrow experts": (_experts, moe_experts, experts_reference, NARROW),
    "glu": (_glu, situ_glu, glu_reference, ((1001, 3072), (1001, 3072))),
}


def _gradients(call, inputs, d_results):
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    results = call(*leaves)
    results = results if isinstance(results, tuple) else (results,)
    return torch.autograd.grad(results, leaves, d_results[: len(results)])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype, limit", [(torch.bfloat16, 8e-3), (torch.float32, 1e-4)])
def test_gradients_at_released_widths(name, dtype, limit):
    run, function, reference, shapes = CASES[name]
    generator = torch.Generator(device="cuda").manual_seed(0)

    def draw(*shape):
        # Multiples of 1/16 below 8: bfloat16 holds their sum, which the oracle does not round.
        drawn = torch.randn(*shape, generator=generator, device="cuda").mul(16).round().div(16)
        if len(shape) == 1:
            return (1 + drawn / 8).to(dtype)
        return (drawn / 64 if shape[0] == 1 else drawn).to(dtype)

    inputs = [draw(*shape) for shape in shapes]
    outputs = run(function, *inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    d_results = [draw(*x.shape) for x in outputs]
    call = partial(run, function)
    got = _gradients(call, inputs, d_results)
    exact = [[t.double() for t in part] for part in (inputs, d_results)]
    for g, e in zip(got, _gradients(partial(run, reference), *exact), strict=True):
        assert relative_error(g, e) < limit
    again = _gradients(call, inputs, d_results)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


@pytest.mark.parametrize("name", [name for name in CASES if name != "conv"])
def test_capture_of_forward_and_backward(name):
    run, function, _, shapes = CASES[name]
    inputs = [torch.randn(*shape, device="cuda").to(torch.bfloat16) for shape in shapes]
    results = run(function, *inputs)
    d_results = results if isinstance(results, tuple) else (results,)
    expected = _gradients(partial(run, function), inputs, d_results)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = _gradients(partial(run, function), inputs, d_results)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))


KDA_LIMITS = (8e-3, 8e-3, 8e-3, 2e-2, 2e-2, 5e-2, 8e-3, 8e-3)
"""Of q, k, v, gate, beta, A_log (one number a head, in which signs cancel), dt_bias, the state."""
KDA_OPTIONS = {
    "default": {},
    "nothing": {"saves": Saves.NOTHING, "backward_slabs": 3},
    "tiles": {"saves": Saves.TILES, "reverse_chunks": 20, "backward_slabs": 2},
    "states": {"saves": Saves.TILES_AND_STATES, "reverse_chunks": 7, "segment_chunks": 9},
}


def _kda(function, *inputs, offsets, **options):
    named = {"lower_bound": -5.0, "cu_seqlens_N1": offsets, "seqlens": LENGTHS}
    state = {"initial_state_NHVK": inputs[7], "output_final_state": True}
    return function(*inputs[:7], **named, **state, **options)


def _kda_offsets():
    return torch.tensor((0, *LENGTHS), device="cuda").cumsum(0)


def _kda_inputs(middle, logits, heads=4, dim=128):
    """Inputs with raw gates around `middle` and these logits of beta in turn; and dO, dS."""
    generator = torch.Generator(device="cuda").manual_seed(0)

    def draw(*shape, dtype=torch.bfloat16):
        return torch.randn(*shape, generator=generator, device="cuda").to(dtype)

    shape, states = (sum(LENGTHS), heads, dim), (len(LENGTHS), heads, dim, dim)
    inputs = [draw(*shape), draw(*shape), draw(*shape), draw(*shape) + middle]
    beta = torch.tensor(logits, device="cuda").repeat(shape[0] * heads)[: shape[0] * heads]
    inputs.append((beta.view(shape[:2]) + draw(*shape[:2])).bfloat16())
    inputs += [draw(heads, dtype=torch.float32) / 4, draw(heads, dim, dtype=torch.float32) / 4]
    inputs.append(draw(*states, dtype=torch.float32))
    return inputs, [draw(*shape), draw(*states, dtype=torch.float32)]


@pytest.mark.parametrize("options", KDA_OPTIONS)
@pytest.mark.parametrize("middle", [0.0, -6.5])
@pytest.mark.parametrize("logits", [(0.0,), (-30.0, 0.0, 4.0)])
def test_gradients_of_kda_chunk(options, middle, logits):
    inputs, d_results = _kda_inputs(middle, logits)
    offsets = _kda_offsets()
    call = partial(_kda, kda_chunk, offsets=offsets, **KDA_OPTIONS[options])
    got = _gradients(call, inputs, d_results)
    exact = [[t.double() for t in part] for part in (inputs, d_results)]
    expected = _gradients(partial(_kda, kda_oracle, offsets=offsets), *exact)
    found = [relative_error(g, e) for g, e in zip(got, expected, strict=True)]
    assert all(x < limit for x, limit in zip(found, KDA_LIMITS, strict=True)), found
    again = _gradients(call, inputs, d_results)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


def test_capture_of_kda_chunk():
    inputs, d_results = _kda_inputs(0.0, (0.0,))
    options = {"offsets": _kda_offsets(), "backward_slabs": 3, "reverse_chunks": 9}
    call = partial(_kda, kda_chunk, **options)
    expected = _gradients(call, inputs, d_results)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = _gradients(call, inputs, d_results)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))


SEGMENT_LIMITS = (8e-3, 8e-3, 2e-2, 2e-2, 5e-2, 8e-3)
"""Of k, v, gate, beta, A_log, dt_bias."""


def _segment(function, *inputs, offsets):
    return function(*inputs, lower_bound=-5.0, cu_seqlens_N1=offsets, seqlens=LENGTHS)


@pytest.mark.parametrize("middle", [0.0, -6.5])
@pytest.mark.parametrize("logits", [(0.0,), (-30.0, 0.0, 4.0)])
def test_gradients_of_kda_segment(middle, logits):
    (_, *inputs, state), _ = _kda_inputs(middle, logits)
    d_results = [torch.randn_like(state), torch.randn_like(state)]
    offsets = _kda_offsets()
    call = partial(_segment, kda_segment, offsets=offsets)
    got = _gradients(call, inputs, d_results)
    exact = [[t.double() for t in part] for part in (inputs, d_results)]
    expected = _gradients(partial(_segment, segment_oracle, offsets=offsets), *exact)
    found = [relative_error(g, e) for g, e in zip(got, expected, strict=True)]
    assert all(x < limit for x, limit in zip(found, SEGMENT_LIMITS, strict=True)), found
    again = _gradients(call, inputs, d_results)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = _gradients(call, inputs, d_results)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, got, strict=True))
