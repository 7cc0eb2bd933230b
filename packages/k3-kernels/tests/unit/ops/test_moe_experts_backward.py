"""moe_experts with gradients against the float64 oracle.

T tokens, D width, I expert width, E experts, k routes a token.
"""

from functools import partial

import pytest
import torch

from k3_core.ops.moe_experts.reference import moe_experts as reference
from k3_core.ops.mx_quantize.reference import mx_quantize
from k3_core.ops.situ_glu.reference import situ_glu
from k3_core.quant import MXTensor, fake_mxfp4, fake_mxfp8
from k3_core.testing import relative_error
from k3_kernels.moe_experts import backward, op, plan, rows
from k3_kernels.moe_experts.op import moe_experts
from k3_kernels.mx_quantize.op import mx_values

pytestmark = pytest.mark.usefixtures("small_expert_tiles")

SITU = partial(situ_glu, beta=4.0, linear_beta=25.0)
UNCAPPED = partial(situ_glu, beta=4.0, linear_beta=None)


class _Problem:
    """Inputs in float64; `results` rounds them and returns the output and all gradients."""

    def __init__(self, device, tokens=40, width=36, inner=20, experts=4, top_k=2, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape, scale=1.0):
            drawn = scale * torch.randn(*shape, generator=generator, dtype=torch.float64)
            return drawn.half().double().to(device)

        shapes = ((experts, inner, width), (experts, inner, width), (experts, width, inner))
        stacks = [draw(*shape, scale=shape[-1] ** -0.5) for shape in shapes]
        weight = draw(tokens, top_k).abs()
        self.inputs = [draw(tokens, width), weight, *stacks]
        # The first expert gets no row, and some experts more than a tile.
        free = torch.rand(tokens, experts - 1, generator=generator)
        self.idx = (1 + free.argsort(1)[:, :top_k]).to(device)
        self.d_out = draw(tokens, width)

    def results(self, function, dtype, activation=SITU, **named):
        leaves = [x.to(dtype).requires_grad_() for x in self.inputs]
        out = function(leaves[0], self.idx, *leaves[1:], activation=activation, **named)
        return [out, *torch.autograd.grad(out, leaves, self.d_out.to(dtype))]


def _check(got, expected, limit=2e-6):
    for g, e in zip(got, expected, strict=True):
        assert relative_error(g, e) < limit


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 2e-6), (torch.float16, 2e-3)])
@pytest.mark.parametrize("activation", [SITU, UNCAPPED])
def test_gradients(dtype, limit, activation, device):
    problem = _Problem(device, width=40, inner=24)
    got = problem.results(moe_experts, dtype, activation)
    assert all(g.dtype == dtype for g in got)
    _check(got, problem.results(reference, torch.float64, activation), limit)
    # The expert that got no row.
    assert not any(g[0].any() for g in got[3:])


@pytest.mark.parametrize("tokens, top_k, experts", [(1, 1, 2), (3, 3, 7), (130, 2, 3)])
@pytest.mark.parametrize("width, inner", [(64, 4), (4, 36)])
def test_sizes(tokens, top_k, experts, width, inner, device):
    problem = _Problem(device, tokens, width, inner, experts, min(top_k, experts - 1))
    got = problem.results(moe_experts, torch.float32)
    _check(got, problem.results(reference, torch.float64))


def test_routes_sorted_by_torch(device, monkeypatch):
    monkeypatch.setattr(plan, "SCAN_LIMIT", 0)
    problem = _Problem(device)
    _check(problem.results(moe_experts, torch.float32), problem.results(reference, torch.float64))


def test_padded_plan(device):
    idx = torch.tensor([[5, 1], [1, 7], [1, -1]] * 9, device=device)
    made = rows.make_padded_plan(idx, 6, 2 * rows.PAD)
    pad, flat = rows.PAD, idx.flatten().tolist()
    own = [[r for r, e in enumerate(flat) if e == expert] for expert in range(6)]
    padded = [-(-len(rows_of) // pad) * pad for rows_of in own]
    assert made.starts.tolist() == [sum(padded[:expert]) for expert in range(7)]
    assert made.begins.tolist() == [sum(map(len, own[:expert])) for expert in range(7)]
    expected = [
        route
        for rows_of, size in zip(own, padded, strict=True)
        for route in [*rows_of, *[-1] * (size - len(rows_of))]
    ]
    assert made.order.tolist() == expected + [-2] * (made.num_rows - len(expected))
    place = made.place.flatten().tolist()
    assert all(
        p == (made.order.tolist().index(r) if 0 <= flat[r] < 6 else -1) for r, p in enumerate(place)
    )


def test_tiles_share_an_experts_rows(device):
    # 7 units in tiles of at most 3: 2, 2 and 3; an expert without rows has no tile.
    starts = torch.tensor([0, 7, 7, 8, 12], dtype=torch.int32, device=device) * 64
    expert, row, size = plan.list_tiles(starts, (12, 64), 3 * 64, 64)
    assert expert.tolist()[:6] == [0, 0, 0, 2, 3, 3] and set(expert.tolist()[6:]) <= {-1}
    assert [r // 64 for r in row.tolist()[:6]] == [0, 2, 4, 7, 8, 10]
    assert [n // 64 for n in size.tolist()[:6]] == [2, 2, 3, 1, 2, 2]
    assert size[-1] == 6 and len(size) == len(expert) + 1


@pytest.mark.parametrize("needed", range(5))
def test_a_single_input_that_needs_a_gradient(needed, device):
    problem = _Problem(device)
    expected = problem.results(reference, torch.float64)[1 + needed]
    leaves = [x.float().detach().requires_grad_(i == needed) for i, x in enumerate(problem.inputs)]
    out = moe_experts(leaves[0], problem.idx, *leaves[1:], activation=SITU)
    (got,) = torch.autograd.grad(out, [leaves[needed]], problem.d_out.float())
    _check([got], [expected])


def test_ids_outside_the_range(device, monkeypatch):
    monkeypatch.setattr(op, "check_routes", lambda *args: None)  # refuses them where it can look
    problem = _Problem(device)
    problem.idx[0, 1], problem.idx[3, 0], problem.idx[7] = -1, 4, 99
    got = problem.results(moe_experts, torch.float32)
    is_known = (problem.idx >= 0) & (problem.idx < 4)
    assert not got[0][7].any() and not got[1][7].any() and not got[2][~is_known].any()
    problem.idx.clamp_(0, 3)
    problem.inputs[1] *= is_known
    expected = problem.results(reference, torch.float64)
    expected[2] *= is_known
    _check(got, expected)


def test_same_bits_in_poisoned_memory(device, monkeypatch):
    problem = _Problem(device)
    first = problem.results(moe_experts, torch.float32)
    empty = torch.empty

    def fill(*args, **named):
        made = empty(*args, **named)
        return made.fill_(float("nan") if made.is_floating_point() else 2**24)

    monkeypatch.setattr(torch, "empty", fill)
    again = problem.results(moe_experts, torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_a_nan_row_leaves_the_other_rows(device):
    problem = _Problem(device)
    problem.inputs[0][2] = float("nan")
    out, d_x, d_weight, *_ = problem.results(moe_experts, torch.float32)
    others = [t for t in range(40) if t != 2]
    assert out[2].isnan().all() and d_x[2].isnan().all() and d_weight[2].isnan().all()
    assert all(t[others].isfinite().all() for t in (out, d_x, d_weight))


def test_strided_inputs(device):
    problem = _Problem(device)
    expected = problem.results(reference, torch.float64)
    x, weight, *stacks = (t.float() for t in problem.inputs)
    wide = torch.cat([x, x], 1).requires_grad_()
    leaves = [weight.T.contiguous().T, *(w.mT.contiguous().mT for w in stacks)]
    leaves = [t.requires_grad_() for t in leaves]
    out = moe_experts(wide[:, 36:], problem.idx.T.contiguous().T, *leaves, activation=SITU)
    got = torch.autograd.grad(out, [wide, *leaves], problem.d_out.float().T.contiguous().T)
    _check([out, got[0][:, 36:], *got[1:]], expected)


def test_no_tokens(device):
    d_x, d_weight, *d_stacks = _Problem(device, tokens=0).results(moe_experts, torch.float32)[1:]
    assert d_x.shape == (0, 36) and d_weight.shape == (0, 2)
    assert not any(d.any() for d in d_stacks)


def test_masters_of_another_dtype(device):
    # Experts in float32 beside 16-bit rows, as under autocast: gradients are not rounded.
    problem = _Problem(device, width=40, inner=24)
    x, weight, *stacks = problem.inputs
    leaves = [x.half(), weight.float(), *(w.float() for w in stacks)]
    leaves = [t.requires_grad_() for t in leaves]
    out = moe_experts(leaves[0], problem.idx, *leaves[1:], activation=SITU)
    got = torch.autograd.grad(out, leaves, problem.d_out.half())
    assert [g.dtype for g in got] == [torch.float16] + [torch.float32] * 4
    _check([out, *got], problem.results(reference, torch.float64), 2e-3)


def test_packed_experts_pass_the_gradient_on(device):
    problem = _Problem(device, width=32, inner=64)
    packed = [mx_quantize(w) for w in problem.inputs[2:]]
    leaves = [x.float().requires_grad_() for x in problem.inputs[:2]]
    out = moe_experts(leaves[0], problem.idx, leaves[1], *packed, activation=SITU)
    got = torch.autograd.grad(out, leaves, problem.d_out.float())
    problem.inputs[2:] = [w.dequantize(torch.float64) for w in packed]
    _check([out, *got], problem.results(reference, torch.float64)[:3])


@pytest.mark.parametrize("weights, activations", [(True, False), (False, True), (True, True)])
def test_quantized_training(weights, activations, device):
    problem = _Problem(device, width=64, inner=32)
    named = {"quantize_weights": weights, "quantize_activations": activations}
    got = problem.results(moe_experts, torch.float32, **named)
    _check(got, problem.results(reference, torch.float64, **named))
    with torch.no_grad():
        x, weight, *stacks = (t.float() for t in problem.inputs)
        out = moe_experts(x, problem.idx, weight, *stacks, activation=SITU, **named)
    assert torch.equal(out, got[0])


@pytest.mark.parametrize("is_fp4, exact", [(True, fake_mxfp4), (False, fake_mxfp8)])
def test_values_of_mx_formats(is_fp4, exact, device):
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(64, 64, generator=generator)
    drawn *= torch.randint(-100, 100, (64, 1), generator=generator).float().exp2()
    # Ties, saturation, zeros, the smallest scale.
    ties = torch.randint(-128, 129, (64, 64), generator=generator) / 8
    tiny = torch.randn(64, 64, generator=generator) * 2.0**-124
    x = torch.cat([drawn, ties, ties / 64, torch.zeros(1, 64), tiny]).to(device)
    assert torch.equal(mx_values(x, x.dtype, is_fp4=is_fp4), exact(x))
    x[3, 5], x[4, 40] = float("nan"), float("inf")
    got = mx_values(x, x.dtype, is_fp4=is_fp4)
    assert got[3, :32].isnan().all() and got[4, 32:].isnan().all()
    assert torch.equal(got.nan_to_num(), exact(x).nan_to_num())


def test_other_activations_and_widths_are_left_to_torch(device, monkeypatch):
    monkeypatch.setattr(backward, "_Experts", None)
    problem = _Problem(device)
    other = lambda gate, up: gate.sigmoid() * up  # noqa: E731
    got = problem.results(moe_experts, torch.float32, other)
    _check(got, problem.results(reference, torch.float64, other))
    problem = _Problem(device, width=35)
    _check(problem.results(moe_experts, torch.float32), problem.results(reference, torch.float64))


def test_second_derivatives_are_refused(device):
    problem = _Problem(device)
    x, weight, *stacks = (t.float() for t in problem.inputs)
    out = moe_experts(x.requires_grad_(), problem.idx, weight, *stacks, activation=SITU)
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


def test_only_the_inputs_are_kept(device):
    problem = _Problem(device)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        leaves = [x.float().requires_grad_() for x in problem.inputs]
        moe_experts(leaves[0], problem.idx, *leaves[1:], activation=SITU)
    assert sorted(t.data_ptr() for t in kept) == sorted(t.data_ptr() for t in leaves)


def test_packed_is_what_training_rounds_to():
    w = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(0))
    assert isinstance(mx_quantize(w), MXTensor)
    assert torch.equal(fake_mxfp4(w), mx_quantize(w).dequantize())
