"""Gradients of rms_norm, gated_rms_norm and situ_glu against the float64 oracle."""

from functools import partial
from typing import Any

import pytest
import torch

from k3_core.ops.gated_rms_norm.reference import gated_rms_norm as gated_reference
from k3_core.ops.rms_norm.reference import rms_norm as norm_reference
from k3_core.ops.situ_glu.reference import situ_glu as glu_reference
from k3_core.testing import relative_error
from k3_kernels.gated_rms_norm import cpu as gated_cpu
from k3_kernels.gated_rms_norm.op import gated_rms_norm
from k3_kernels.rms_norm import backward
from k3_kernels.rms_norm import cpu as norm_cpu
from k3_kernels.rms_norm.op import rms_norm
from k3_kernels.situ_glu import cpu as glu_cpu
from k3_kernels.situ_glu.op import situ_glu

CAPPED: dict[str, Any] = {"beta": 4.0, "linear_beta": 25.0}
UNCAPPED = {**CAPPED, "linear_beta": None}
OPS = {
    "norm": (partial(rms_norm, eps=1e-3), partial(norm_reference, eps=1e-3)),
    "gated": (partial(gated_rms_norm, eps=1e-3), partial(gated_reference, eps=1e-3)),
    "glu": (partial(situ_glu, **CAPPED), partial(glu_reference, **CAPPED)),
    "plain glu": (partial(situ_glu, **UNCAPPED), partial(glu_reference, **UNCAPPED)),
}


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """Several tiles a program, and rows of several warps."""
    monkeypatch.setattr(backward, "NARROW", backward.Tile(64, 2, 2, 3))
    monkeypatch.setattr(backward, "WIDE", backward.Tile(0, 4, 2, 3))
    monkeypatch.setattr(backward, "NARROW_WIDTH", 32)


def _draw(name, device, dtype=torch.float32, shape=(5, 3, 33)):
    """Inputs of an op, and the gradient of its result."""
    generator = torch.Generator().manual_seed(0)

    def one(*shape):
        return (torch.randn(*shape, generator=generator) * 1.5).to(device, dtype)

    x, other, d_out, weight = one(*shape), one(*shape), one(*shape), one(shape[-1]) / 8 + 1
    inputs = {"norm": (x, weight), "gated": (x, weight, other)}.get(name, (x, other))
    return inputs, d_out


def _gradients(function, inputs, d_out):
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    return torch.autograd.grad(function(*leaves), leaves, d_out)


def _exact(name, inputs, d_out):
    return _gradients(OPS[name][1], [t.double() for t in inputs], d_out.double())


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("shape", [(5, 3, 33), (37, 1, 16), (1, 2, 2), (3, 2, 200)])
@pytest.mark.parametrize("dtype, limit", [(torch.float32, 5e-6), (torch.float16, 2e-3)])
def test_sizes(name, shape, dtype, limit, device):
    case = _draw(name, device, dtype, shape)
    for g, e in zip(_gradients(OPS[name][0], *case), _exact(name, *case), strict=True):
        assert g.dtype == dtype and relative_error(g, e) < limit


@pytest.mark.parametrize("name", OPS)
def test_a_single_input_that_needs_a_gradient(name, device):
    inputs, d_out = _draw(name, device)
    for needed, expected in enumerate(_exact(name, inputs, d_out)):
        leaves = [t.clone().requires_grad_(i == needed) for i, t in enumerate(inputs)]
        (got,) = torch.autograd.grad(OPS[name][0](*leaves), [leaves[needed]], d_out)
        assert relative_error(got, expected) < 5e-6


@pytest.mark.parametrize("name", OPS)
def test_strided_inputs_and_gradient(name, device):
    inputs, d_out = _draw(name, device)
    expected = _exact(name, inputs, d_out)
    parts = [t for t in inputs if t.dim() == 3]
    wide = torch.cat(parts, dim=-1).requires_grad_()
    rest = [t.clone().requires_grad_() for t in inputs if t.dim() == 1]
    first, *others = wide.split(33, dim=-1)
    out = OPS[name][0](first, *rest, *others)
    d_wide = torch.cat((d_out, torch.full_like(d_out, float("nan"))), dim=-1)[..., :33]
    d_parts, *d_rest = torch.autograd.grad(out, [wide, *rest], d_wide)
    first, *others = d_parts.split(33, dim=-1)
    for g, e in zip((first, *d_rest, *others), expected, strict=True):
        assert relative_error(g, e) < 5e-6


@pytest.mark.parametrize("name", OPS)
def test_expanded_gradient(name, device):
    inputs, d_out = _draw(name, device)
    ones = torch.ones((), device=device).expand(d_out.shape)
    expected = _exact(name, inputs, torch.ones_like(d_out))
    for g, e in zip(_gradients(OPS[name][0], inputs, ones), expected, strict=True):
        assert relative_error(g, e) < 5e-6


@pytest.mark.parametrize("name", OPS)
def test_same_bits_in_poisoned_memory(name, device, monkeypatch):
    case = _draw(name, device)
    first = _gradients(OPS[name][0], *case)
    empty = torch.empty
    fill = lambda *args, **named: empty(*args, **named).fill_(float("nan"))  # noqa: E731
    monkeypatch.setattr(torch, "empty", fill)
    again = _gradients(OPS[name][0], *case)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("name", OPS)
def test_no_rows(name, device):
    inputs, d_out = _draw(name, device, shape=(0, 3, 8))
    for t, g in zip(inputs, _gradients(OPS[name][0], inputs, d_out), strict=True):
        assert g.shape == t.shape and not g.any()


@pytest.mark.parametrize("name", OPS)
def test_second_derivatives_are_refused(name, device):
    inputs, _ = _draw(name, device)
    out = OPS[name][0](*[t.requires_grad_() for t in inputs])
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(out.sum(), inputs, create_graph=True)


@pytest.mark.parametrize("size", [1e-6, 1e-2, 0.7])
def test_glu_gradients_are_accurate_at_every_size(size, device):
    inputs, d_out = _draw("glu", device)
    inputs = [size * t for t in inputs]
    expected = _exact("glu", inputs, d_out)
    for g, e in zip(_gradients(OPS["glu"][0], inputs, d_out), expected, strict=True):
        assert ((g.double() - e).abs() <= 3e-6 * e.abs() + 3e-7 * e.abs().max()).all()


def test_glu_slope_where_the_cap_is_reached(device):
    # Element by element: 1 - tanh^2 cancels there, in float64 too.
    up = torch.linspace(-600, 600, 41, device=device)
    ones = torch.ones_like(up)
    _, d_up = _gradients(OPS["glu"][0], [ones, up], ones)
    middle = _exact("glu", [ones[:1], 0 * up[:1]], ones[:1])[1]
    expected = middle / torch.cosh(up.double() / 25).square()
    assert ((d_up.double() - expected).abs() <= 1e-5 * expected).all()


def test_glu_at_infinity(device):
    gate = torch.tensor([float("inf"), -float("inf")]).to(device)
    up = torch.full_like(gate, float("inf"))
    d_gate, d_up = _gradients(OPS["glu"][0], [gate, up], torch.ones_like(gate))
    assert d_gate.tolist() == [0.0, 0.0] and not d_up.any()


def test_plain_torch_passes_gradcheck():
    x, weight, gate = (
        t.requires_grad_() for t in _draw("gated", "cpu", torch.float64, (3, 2, 5))[0]
    )
    assert torch.autograd.gradcheck(partial(norm_cpu.rms_norm, eps=1e-3), (x, weight))
    assert torch.autograd.gradcheck(partial(gated_cpu.gated_rms_norm, eps=1e-3), (x, weight, gate))
    for betas in (CAPPED, UNCAPPED):
        assert torch.autograd.gradcheck(partial(glu_cpu.situ_glu, **betas), (x, gate))
