"""Gradients of attn_res and depth_read against the float64 oracle. T tokens, D width."""

import pytest
import torch

from k3_core.ops.attn_res.reference import attn_res as mix_reference
from k3_core.ops.depth_read.reference import depth_read as read_reference
from k3_core.testing import relative_error
from k3_kernels.attn_res import backward, cpu
from k3_kernels.attn_res.op import attn_res
from k3_kernels.depth_read import cpu as depth_cpu
from k3_kernels.depth_read.op import depth_read

NAMED = {"eps": 1e-5, "out_eps": 1e-3}
"""An eps of the output norm that shows what is left of the radial part."""


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """Several tokens a program, and rows of several warps."""
    monkeypatch.setattr(backward, "WHOLE", backward.Whole(128, 4, 2))
    monkeypatch.setattr(backward, "TILE", backward.Tile(16, 2, 2, 3))


@pytest.fixture(params=["whole", "stream"])
def kernel(request, monkeypatch):
    """Of a token whose sources fit the registers, or of any."""
    if request.param == "stream":
        monkeypatch.setattr(backward, "WHOLE", backward.Whole(128, 0, 2))


def _draw(num_sources, device, dtype=torch.float32, tokens=7, width=33):
    """Sources, the added output; norm, proj, output norm; gradients of x and of the sum."""
    generator = torch.Generator().manual_seed(0)

    def one(*shape):
        return torch.randn(*shape, generator=generator).to(device, dtype)

    values = [one(tokens, width) * (1 + i / 2) for i in range(num_sources + 1)]
    weights = [one(width) / 4 + 1, one(1, width), one(width) / 4 + 1]
    return values, weights, [one(tokens, width), one(tokens, width)]


def _mixed(function, values, weights, outputs):
    leaves = [t.detach().clone().requires_grad_() for t in (*values, *weights[:2])]
    out = function(leaves[:-2], *leaves[-2:], eps=1e-5)
    return torch.autograd.grad(out, leaves, outputs[0])


def _read(function, values, weights, outputs, has_added=True):
    leaves = [t.detach().clone().requires_grad_() for t in (*values, *weights)]
    *sources, last = leaves[:-3]
    args = (sources[:-1], sources[-1], last) if has_added else (sources, last, None)
    results = function(*args, *leaves[-3:], **NAMED)
    return torch.autograd.grad(results, leaves, outputs)


def _double(*parts):
    return [[t.double() for t in part] for part in parts]


@pytest.mark.parametrize("num_sources", [1, 2, 9])
@pytest.mark.parametrize("dtype, limit", [(torch.float32, 5e-6), (torch.float16, 2e-3)])
def test_mix(kernel, num_sources, dtype, limit, device):
    case = _draw(num_sources - 1, device, dtype)
    expected = _mixed(mix_reference, *_double(*case))
    for g, e in zip(_mixed(attn_res, *case), expected, strict=True):
        assert g.dtype == dtype and relative_error(g, e) < limit


@pytest.mark.parametrize("num_sources, has_added", [(1, True), (4, True), (3, False)])
@pytest.mark.parametrize("dtype, limit", [(torch.float32, 5e-6), (torch.float16, 4e-3)])
def test_read(kernel, num_sources, has_added, dtype, limit, device):
    case = _draw(num_sources, device, dtype)
    if dtype == torch.float16 and has_added:
        # The oracle mixes the sum as it is rounded: one that float16 holds.
        case[0][-1].copy_((case[0][-1] + case[0][-2]) - case[0][-2])
    expected = _read(read_reference, *_double(*case), has_added)
    for g, e in zip(_read(depth_read, *case, has_added), expected, strict=True):
        assert g.dtype == dtype and relative_error(g, e) < limit


@pytest.mark.parametrize("tokens, width", [(1, 1), (5, 64), (40, 16)])
def test_sizes(kernel, tokens, width, device):
    case = _draw(3, device, tokens=tokens, width=width)
    expected = _read(read_reference, *_double(*case))
    size = max(float(e.norm()) for e in expected)
    for g, e in zip(_read(depth_read, *case), expected, strict=True):
        # At width 1 the norm leaves gradients of rounding errors.
        assert float((g.double() - e).norm()) < 5e-6 * float(e.norm()) + 1e-6 * size


@pytest.mark.parametrize("needed", range(7))
def test_a_single_input_that_needs_a_gradient(needed, device):
    values, weights, outputs = _draw(3, device)
    expected = _read(read_reference, *_double(values, weights, outputs))[needed]
    leaves = [t.clone().requires_grad_(i == needed) for i, t in enumerate((*values, *weights))]
    results = depth_read(leaves[:2], *leaves[2:], **NAMED)
    kept = [(r, o) for r, o in zip(results, outputs, strict=True) if r.requires_grad]
    (got,) = torch.autograd.grad([r for r, _ in kept], [leaves[needed]], [o for _, o in kept])
    assert relative_error(got, expected) < 5e-6


@pytest.mark.parametrize("used", [0, 1])
def test_only_one_result_is_used(used, device):
    values, weights, outputs = _draw(2, device)
    silent = [o * (i == used) for i, o in enumerate(outputs)]
    expected = _read(read_reference, *_double(values, weights, silent))
    leaves = [t.clone().requires_grad_() for t in (*values, *weights)]
    results = depth_read(leaves[:1], *leaves[1:], **NAMED)
    got = torch.autograd.grad(results[used], leaves, outputs[used], materialize_grads=True)
    for g, e in zip(got, expected, strict=True):
        assert relative_error(g, e) < 5e-6


def test_strided_sources_and_gradient(device):
    values, weights, outputs = _draw(2, device)
    expected = _mixed(mix_reference, *_double(values, weights, outputs))
    wide = torch.cat([*values], dim=1).requires_grad_()
    leaves = [w.clone().requires_grad_() for w in weights[:2]]
    out = attn_res(wide.chunk(3, dim=1), *leaves, eps=1e-5)
    got = torch.autograd.grad(out, [wide, *leaves], outputs[0].T.contiguous().T)
    for g, e in zip((*got[0].chunk(3, dim=1), *got[1:]), expected, strict=True):
        assert relative_error(g, e) < 5e-6


def test_same_bits_in_poisoned_memory(kernel, device, monkeypatch):
    case = _draw(3, device)
    first = _read(depth_read, *case)
    empty = torch.empty
    fill = lambda *args, **named: empty(*args, **named).fill_(float("nan"))  # noqa: E731
    monkeypatch.setattr(torch, "empty", fill)
    assert all(torch.equal(a, b) for a, b in zip(first, _read(depth_read, *case), strict=True))


def test_no_tokens(device):
    *d_values, d_norm, d_proj = _mixed(attn_res, *_draw(2, device, tokens=0))
    assert all(d.shape == (0, 33) for d in d_values)
    assert not d_norm.any() and not d_proj.any() and d_proj.shape == (1, 33)


def test_a_nan_row_leaves_the_other_rows(device):
    case = _draw(2, device)
    case[0][1][2] = float("nan")
    for d_value in _mixed(attn_res, *case)[:3]:
        assert d_value[2].isnan().all() and d_value[[0, 1, 3, 4, 5, 6]].isfinite().all()


def test_sources_of_two_dtypes(device):
    """In that of the last one, by the kernels: plain torch took a fifth of a training step."""
    values, weights, outputs = _draw(2, device)
    values[0] = values[0].half()
    expected = _mixed(mix_reference, *_double(values, weights, outputs))
    got = _mixed(attn_res, values, weights, outputs)
    assert [g.dtype for g in got[:3]] == [torch.float16, torch.float32, torch.float32]
    for g, e in zip(got, expected, strict=True):
        assert relative_error(g, e) < 1e-3


def test_an_output_of_another_dtype_than_the_sum(device):
    values, weights, outputs = _draw(2, device)
    values[-1] = values[-1].half()
    expected = _read(read_reference, *_double(values, weights, outputs))
    got = _read(depth_read, values, weights, outputs)
    assert got[2].dtype == torch.float16
    for g, e in zip(got, expected, strict=True):
        assert relative_error(g, e) < (1e-3 if g.dtype == torch.float16 else 5e-6)


def test_second_derivatives_are_refused(device):
    values, weights, _ = _draw(1, device)
    out = attn_res([v.requires_grad_() for v in values], *weights[:2], eps=1e-5)
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(out.sum(), values, create_graph=True)


def test_plain_torch_passes_gradcheck():
    values, weights, _ = _draw(2, "cpu", torch.float64, tokens=3, width=5)
    leaves = [t.requires_grad_() for t in (*values, *weights)]

    def mixed(norm, proj, *sources):
        return cpu.attn_res(sources, norm, proj, eps=1e-5)

    def read(norm, proj, out_norm, source, prefix, added):
        args = [source], prefix, added, norm, proj, out_norm
        return depth_cpu.depth_read(*args, **NAMED)

    assert torch.autograd.gradcheck(mixed, (*leaves[3:5], *leaves[:3]))
    assert torch.autograd.gradcheck(read, (*leaves[3:], *leaves[:3]))


def test_which_backward_runs(monkeypatch):
    monkeypatch.undo()

    def chosen(width, num_sources):
        d_out = torch.empty(3, width, dtype=torch.bfloat16)
        return backward._choose(d_out, num_sources, num_sources + 2)[0]

    whole, stream = backward.whole_backward_kernel, backward.mix_backward_kernel
    assert chosen(512, 5) is chosen(1024, 9) is whole
    assert chosen(2048, 9) is chosen(7168, 3) is stream


def test_which_backward_runs_in_gluon(monkeypatch):
    d_out = torch.empty(3, 7168, dtype=torch.bfloat16)
    assert backward.ring_slots(d_out, 11) == 0
    monkeypatch.setattr(backward, "has_gluon", lambda device: True)
    assert backward.ring_slots(d_out, 11) == 16
    assert backward.ring_slots(d_out, 16) == 0
    assert backward.ring_slots(d_out.float(), 5) == 8
    assert backward.ring_slots(d_out.float(), 10) == 0
    assert backward.ring_slots(d_out[:, :7000], 11) == 0
