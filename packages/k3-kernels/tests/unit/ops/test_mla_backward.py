"""Gradients of mla_prefill against the float64 oracle.

T queries, S keys, H heads, D head dim, V value dim.
"""

import pytest
import torch

from k3_core.ops.mla_prefill.reference import mla_prefill as reference
from k3_core.testing import relative_error
from k3_kernels.mla_prefill import backward, cpu
from k3_kernels.mla_prefill.backward import Tile
from k3_kernels.mla_prefill.backward_tiles import locate_kernel, unpad_kernel
from k3_kernels.mla_prefill.op import mla_prefill

LENGTHS = {
    "square": ((45,), (45,)),
    "past": ((0, 17, 1, 0, 5), (3, 40, 1, 0, 21)),
    "longer": ((130, 3), (130, 70)),
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several tiles of both kinds a sequence."""
    for tiles in (backward.KEYS, backward.QUERIES):
        for num_bytes in tiles:
            monkeypatch.setitem(tiles, num_bytes, Tile(16, 32, 4, 1))


def _draw(lengths, device, dtype=torch.float32, dims=(48, 24), heads=2):
    """q, k, v; the gradient of the output; the call's other arguments."""
    queries, keys = lengths
    generator = torch.Generator().manual_seed(0)

    def one(tokens, dim):
        return torch.randn(tokens, heads, dim, generator=generator).to(device, dtype)

    inputs = [one(sum(queries), dims[0]), one(sum(keys), dims[0]), one(sum(keys), dims[1])]
    cu_q, cu_k = (torch.tensor((0, *n)).cumsum(0).to(device) for n in lengths)
    named = {"scale": dims[0] ** -0.5, "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    return inputs, one(sum(queries), dims[1]), named


def _gradients(function, inputs, d_out, named, **more):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves, **named, **more)
    out = out[0] if isinstance(out, tuple) else out
    return torch.autograd.grad(out, leaves, d_out.to(out.dtype))


def _expected(inputs, d_out, named):
    return _gradients(reference, [x.double() for x in inputs], d_out.double(), named)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("dims", [(48, 24), (32, 16)])
@pytest.mark.parametrize("dtype, limit", [(torch.float32, 5e-6), (torch.float16, 2e-3)])
def test_gradients(lengths, dims, dtype, limit, device):
    case = _draw(lengths, device, dtype, dims)
    for g, e in zip(_gradients(mla_prefill, *case), _expected(*case), strict=True):
        assert g.dtype == dtype and relative_error(g, e) < limit


@pytest.mark.parametrize("function", [mla_prefill, cpu.mla_prefill, reference])
def test_maxima_and_an_unrounded_output(function, device):
    inputs, d_out, named = _draw(LENGTHS["past"], device, torch.float16)
    more = {"return_max": True, "out_dtype": torch.float32}
    out, largest = function(*[x.clone().requires_grad_() for x in inputs], **named, **more)
    assert out.dtype == torch.float32 and out.requires_grad and not largest.requires_grad
    exact = [x.double() for x in inputs]
    expected, expected_max = reference(*exact, **named, return_max=True)
    assert relative_error(out, expected) < 5e-4
    assert relative_error(largest, expected_max) < 1e-6
    got = _gradients(function, inputs, d_out, named, **more)
    for g, e in zip(got, _expected(inputs, d_out, named), strict=True):
        assert g.dtype == torch.float16 and relative_error(g, e) < 2e-3


def test_equal_values_leave_no_gradient_of_scores(device):
    # dP equals delta then, but for the rounding of weights, if neither the output nor its gradient
    # are rounded in one of them alone.
    inputs, d_out, named = _draw(((33,), (33,)), device, torch.float16)
    inputs[2][:] = inputs[2][0] / 3
    d_out = d_out.float() * (1 + torch.randn_like(d_out.float()) / 1000)
    dq, dk, dv = _gradients(mla_prefill, inputs, d_out, named, out_dtype=torch.float32)
    assert float(dq.abs().max()) < 1e-4 and float(dk.abs().max()) < 1e-4
    assert relative_error(dv, _expected(inputs, d_out, named)[2]) < 2e-3


@pytest.mark.parametrize("needed", range(3))
def test_a_single_input_that_needs_a_gradient(needed, device):
    inputs, d_out, named = _draw(LENGTHS["past"], device)
    leaves = [x.clone().requires_grad_(i == needed) for i, x in enumerate(inputs)]
    (got,) = torch.autograd.grad(mla_prefill(*leaves, **named), [leaves[needed]], d_out)
    assert relative_error(got, _expected(inputs, d_out, named)[needed]) < 5e-6


def test_strided_heads_and_gradient(device):
    # k and v as halves of one projection, q as a slice of a wider one, one gradient for all heads.
    generator = torch.Generator().manual_seed(1)
    joined = torch.randn(23, 2, 72, generator=generator).to(device)
    wide = torch.randn(23, 2, 64, generator=generator).to(device)
    _, d_out, named = _draw(((23,), (23,)), device)
    d_out = d_out[:, :1].expand(-1, 2, -1)
    k, v = joined.split((48, 24), dim=-1)
    expected = _expected([wide[..., 8:56], k, v], d_out, named)
    leaves = [wide.requires_grad_(), joined.requires_grad_()]
    k, v = joined.split((48, 24), dim=-1)
    out = mla_prefill(wide[..., 8:56], k, v, **named)
    d_wide, d_joined = torch.autograd.grad(out, leaves, d_out)
    got = d_wide[..., 8:56], d_joined[..., :48], d_joined[..., 48:]
    for g, e in zip(got, expected, strict=True):
        assert relative_error(g, e) < 5e-6


def test_same_bits_in_poisoned_memory(device, monkeypatch):
    case = _draw(LENGTHS["past"], device)
    first = _gradients(mla_prefill, *case)
    empty = torch.empty
    fill = lambda *args, **named: empty(*args, **named).fill_(float("nan"))  # noqa: E731
    monkeypatch.setattr(torch, "empty", fill)
    assert all(map(torch.equal, first, _gradients(mla_prefill, *case)))


def test_sequences_are_kept_apart(device):
    inputs, d_out, named = _draw(((19, 7, 9), (19, 12, 9)), device)
    expected = _gradients(mla_prefill, inputs, d_out, named)
    for x, start, stop in zip(inputs, (19, 19, 19), (26, 31, 31), strict=True):
        x[start:stop] = float("nan")
    got = _gradients(mla_prefill, inputs, d_out, named)
    for g, e, stop in zip(got, expected, (26, 31, 31), strict=True):
        assert g[19:stop].isnan().all()
        assert torch.equal(g[:19], e[:19]) and torch.equal(g[stop:], e[stop:])


@pytest.mark.parametrize("keys", [(0,), (3, 5)])
def test_no_queries(keys, device):
    case = _draw(((0,) * len(keys), keys), device)
    for g, x in zip(_gradients(mla_prefill, *case), case[0], strict=True):
        assert g.shape == x.shape and not g.any()


def test_32_bit_offsets_and_an_unused_output(device):
    inputs, d_out, named = _draw(LENGTHS["past"], device)
    narrow = {k: v if k == "scale" else v.int() for k, v in named.items()}
    got = _gradients(mla_prefill, inputs, d_out, narrow)
    assert all(map(torch.equal, got, _gradients(mla_prefill, inputs, d_out, named)))
    leaves = [x.clone().requires_grad_() for x in inputs]
    out, _ = mla_prefill(*leaves, **named, return_max=True)
    torch.autograd.backward(out, d_out)
    assert all(map(torch.equal, got, (x.grad for x in leaves)))


def test_where_tiles_are(device):
    # 2 + 0 + 3 tiles of 32 keys; queries padded to 16.
    cu_q, cu_k = (torch.tensor(x, device=device) for x in ([0, 20, 20, 84], [0, 40, 40, 124]))
    table = torch.full((7, 6), -1, dtype=torch.int32, device=device)
    locate_kernel[(7,)](cu_q, cu_k, table, 3, NPAD=4, ROWS=16, BN=32)
    first, last = [0, 20, 0, 40], [20, 64, 40, 84]
    expected = [[*first, 0, 0], [*first, 1, 0]] + [[*last, i, 32] for i in range(3)]
    assert table[:5].tolist() == expected
    assert table[5:, 3].tolist() == [0, 0]


def _in_register_order(x):
    """A tile [64, columns] as 128 threads hold it: 4 values of every 8 columns each."""
    columns, thread, register = torch.meshgrid(
        *(torch.arange(n) for n in (x.shape[1] // 8, 128, 4)), indexing="ij"
    )
    warp, lane = thread // 32, thread % 32
    row = 16 * warp + lane // 4 + 8 * (register // 2)
    return x[row, 8 * columns + 2 * (lane % 4) + register % 2].flatten()


def test_unpadded_queries(device):
    # 1 + 0 + 2 tiles of 128 queries, a fourth one unused; 64 queries lie as four blocks of columns.
    cu = torch.tensor([0, 20, 20, 170], device=device)
    padded = torch.randn(2, 4 * 128, 48, generator=torch.Generator().manual_seed(0))
    parts = [x.split((16, 16, 8, 8), dim=1) for x in padded.view(-1, 64, 48)]
    ordered = torch.cat([_in_register_order(x) for part in parts for x in part]).to(device)
    dq = torch.full((170, 2, 48), float("nan"), device=device)
    unpad_kernel[(8,)](ordered, cu, dq, 3, 4, 2, 0.5, D=48, DA=32, DB=16, NPAD=4, ROWS=128)
    expected = torch.cat((padded[:, :20], padded[:, 128:278]), dim=1).transpose(0, 1) / 2
    assert torch.equal(dq, expected.to(device))


def test_second_derivatives_are_refused(device):
    inputs, _, named = _draw(((5,), (5,)), device)
    leaves = [x.requires_grad_() for x in inputs]
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(mla_prefill(*leaves, **named).sum(), leaves, create_graph=True)


@pytest.mark.parametrize("return_max", [False, True])
def test_plain_torch_passes_gradcheck(return_max):
    inputs, _, named = _draw(((0, 4, 3), (2, 6, 3)), "cpu", torch.float64, (5, 3))

    def attend(*leaves):
        out = cpu.mla_prefill(*leaves, **named, return_max=return_max)
        return out[0] if return_max else out

    assert torch.autograd.gradcheck(attend, [x.requires_grad_() for x in inputs])
