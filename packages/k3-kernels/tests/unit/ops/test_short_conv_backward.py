"""Gradients of short_conv against the float64 oracle. T tokens, C channels, W taps."""

import pytest
import torch

from k3_core.ops.short_conv.reference import short_conv as reference
from k3_core.testing import relative_error
from k3_kernels.short_conv import backward, cpu
from k3_kernels.short_conv.op import short_conv

CHANNELS = 12
SMALL = backward.Tile(8, 2, 8, 4, 2, 1)
"""So that few tokens fill several programs, those that need no masks among them."""


def _draw(lengths, device, width=4, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    num_tokens, num_history = sum(lengths), width - 1
    shapes = (num_tokens, CHANNELS), (CHANNELS, 1, width), (len(lengths), CHANNELS, num_history)
    drawn = [torch.randn(*s, generator=generator) for s in (*shapes, shapes[0], shapes[2])]
    x, weight, state, d_y, d_final = (t.to(device, dtype) for t in drawn)
    return (x, weight, state), (d_y, d_final), torch.tensor((0, *lengths)).cumsum(0).to(device)


def _gradients(function, inputs, outputs, cu, has_state=True, has_final=True):
    leaves = [t.detach().clone().requires_grad_() for t in inputs[: 3 if has_state else 2]]
    results = function(
        *leaves[:2],
        cu_seqlens_N1=cu,
        initial_state_NCW=leaves[2] if has_state else None,
        output_final_state=has_final,
    )
    count = 2 if has_final else 1
    return torch.autograd.grad(results[:count], leaves, outputs[:count])


def _exact(inputs, outputs, cu, **named):
    double = [tuple(t.double() for t in part) for part in (inputs, outputs)]
    return _gradients(reference, *double, cu, **named)


@pytest.mark.parametrize("lengths", [(70,), (1, 0, 0, 2, 33, 3, 0), (0, 40), (32, 32), (3,) * 9])
@pytest.mark.parametrize("has_state, has_final", [(True, True), (False, True), (True, False)])
def test_many_lengths(lengths, has_state, has_final, device, monkeypatch):
    monkeypatch.setattr(backward, "TILE", SMALL)
    case = _draw(lengths, device)
    named = {"has_state": has_state, "has_final": has_final}
    got = _gradients(short_conv, *case, **named)
    for g, e in zip(got, _exact(*case, **named), strict=True):
        assert relative_error(g, e) < 1e-6


@pytest.mark.parametrize("width", [2, 3, 5])
@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-6), (torch.float16, 2e-3)])
def test_other_widths_and_dtypes(width, dtype, limit, device, monkeypatch):
    monkeypatch.setattr(backward, "TILE", SMALL)
    case = _draw((50, 7), device, width, dtype)
    for g, e in zip(_gradients(short_conv, *case), _exact(*case), strict=True):
        assert g.dtype == dtype and relative_error(g, e) < limit


@pytest.mark.parametrize("needed", [0, 1, 2])
def test_a_single_input_that_needs_a_gradient(needed, device):
    inputs, outputs, cu = _draw((9, 4), device)
    expected = _exact(inputs, outputs, cu)[needed]
    leaves = [t.clone().requires_grad_(i == needed) for i, t in enumerate(inputs)]
    results = short_conv(
        *leaves[:2], cu_seqlens_N1=cu, initial_state_NCW=leaves[2], output_final_state=True
    )
    (got,) = torch.autograd.grad(results, [leaves[needed]], outputs)
    assert relative_error(got, expected) < 1e-6


def test_only_the_final_state_is_used(device):
    inputs, outputs, cu = _draw((9, 2), device)
    for function, scale in ((short_conv, 1.0), (cpu.short_conv, 1.0)):
        leaves = [t.clone().requires_grad_() for t in inputs]
        _, final = function(
            *leaves[:2], cu_seqlens_N1=cu, initial_state_NCW=leaves[2], output_final_state=True
        )
        got = torch.autograd.grad(final, leaves, outputs[1])
        silent = torch.zeros_like(outputs[0]), outputs[1] * scale
        for g, e in zip(got, _exact(inputs, silent, cu), strict=True):
            assert relative_error(g, e) < 1e-6


def test_strided_inputs_and_gradients(device):
    inputs, (d_y, d_final), cu = _draw((20,), device)
    expected = _exact(inputs, (d_y, d_final), cu)
    wide = torch.full((20, 3 * CHANNELS), float("nan"), device=device)
    wide[:, CHANNELS : 2 * CHANNELS] = inputs[0]
    d_wide = torch.full((20, 2 * CHANNELS), float("nan"), device=device)
    d_wide[:, CHANNELS:] = d_y
    wide.requires_grad_()
    rest = [t.clone().requires_grad_() for t in inputs[1:]]
    results = short_conv(
        wide[:, CHANNELS : 2 * CHANNELS],
        rest[0],
        cu_seqlens_N1=cu,
        initial_state_NCW=rest[1],
        output_final_state=True,
    )
    grads = (d_wide[:, CHANNELS:], d_final.mT.contiguous().mT)
    d_all, *others = torch.autograd.grad(results, [wide, *rest], grads)
    got = d_all[:, CHANNELS : 2 * CHANNELS], *others
    for g, e in zip(got, expected, strict=True):
        assert relative_error(g, e) < 1e-6


def test_same_bits_in_poisoned_memory(device, monkeypatch):
    monkeypatch.setattr(backward, "TILE", SMALL)
    case = _draw((37, 26), device)
    first = _gradients(short_conv, *case)
    empty = torch.empty
    fill = lambda *args, **named: empty(*args, **named).fill_(float("nan"))  # noqa: E731
    monkeypatch.setattr(torch, "empty", fill)
    again = _gradients(short_conv, *case)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_no_tokens(device):
    inputs, outputs, cu = _draw((0, 0), device)
    d_x, d_weight, d_state = _gradients(short_conv, inputs, outputs, cu)
    assert d_x.shape == (0, CHANNELS) and not d_weight.any() and torch.equal(d_state, outputs[1])


def test_nan_stays_in_its_window(device, monkeypatch):
    monkeypatch.setattr(backward, "TILE", SMALL)
    inputs, outputs, cu = _draw((40, 20), device)
    inputs[0][39] = float("nan")
    d_x = _gradients(short_conv, inputs, outputs, cu)[0]
    assert d_x[36:40].isnan().all()
    assert d_x[:36].isfinite().all() and d_x[40:].isfinite().all()


def test_second_derivatives_are_refused(device):
    (x, weight, _), _, cu = _draw((5,), device)
    y, _ = short_conv(x.requires_grad_(), weight, cu_seqlens_N1=cu)
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_plain_torch_passes_gradcheck():
    inputs, _, cu = _draw((5, 2, 0), "cpu", dtype=torch.float64)
    leaves = [t.requires_grad_() for t in inputs]

    def call(x, weight, state):
        return cpu.short_conv(
            x, weight, cu_seqlens_N1=cu, initial_state_NCW=state, output_final_state=True
        )

    assert torch.autograd.gradcheck(call, leaves)
