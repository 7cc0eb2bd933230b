"""When mla_prefill and mla_decode run in Gluon, and that they are right there: a Hopper GPU only.

T queries, S keys, H heads, D head dim, P pages of L tokens, M pages a sequence.
"""

from functools import partial

import pytest
import torch

from k3_core.ops.mla_decode.reference import mla_decode as decode_reference
from k3_core.ops.mla_prefill.reference import mla_prefill as prefill_reference
from k3_core.testing import relative_error
from k3_kernels.hopper import has_gluon
from k3_kernels.mla_decode import op as decode_op
from k3_kernels.mla_prefill import forward as prefill_forward
from k3_kernels.mla_prefill.op import mla_prefill

HALVES = [(torch.bfloat16, 4e-3), (torch.float16, 6e-4)]
"""A dtype and the error of weights rounded to it."""
on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and has_gluon(torch.device("cuda", 0))),
        reason="needs a GPU of compute capability 9.0",
    ),
]


def _gpu(function):
    for mark in on_gpu:
        function = mark(function)
    return function


def _randn(*shape, dtype=torch.bfloat16, device="cpu", seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def test_which_prefill_runs_in_gluon(monkeypatch):
    q, v = _randn(5, 2, 192), _randn(5, 2, 128)
    assert not prefill_forward.uses_gluon(q, q, v)
    monkeypatch.setattr(prefill_forward, "has_gluon", lambda device: True)
    assert prefill_forward.uses_gluon(q, q, v)
    assert prefill_forward.uses_gluon(q.half(), q.half(), v.half())
    assert not prefill_forward.uses_gluon(q.float(), q.float(), v.float())
    assert not prefill_forward.uses_gluon(q, q, v[..., :64])
    joined = _randn(5, 2, 192 + 130)
    # Heads 322 values apart start off the boundaries of 8 values.
    assert not prefill_forward.uses_gluon(q, joined[..., :192], v)
    assert prefill_forward.uses_gluon(q, _randn(5, 2, 320)[..., :192], v)


def test_which_decode_runs_in_gluon(monkeypatch):
    latent, rope, pages = _randn(2, 3, 512), _randn(2, 3, 64), _randn(4, 64, 576)
    assert not decode_op.uses_gluon(latent, rope, pages)
    monkeypatch.setattr(decode_op, "has_gluon", lambda device: True)
    assert decode_op.uses_gluon(latent, rope, pages)
    assert decode_op.uses_gluon(latent, rope, _randn(4, 3, 64, 576)[:, 1])
    assert not decode_op.uses_gluon(latent, rope, pages.half())
    assert not decode_op.uses_gluon(latent, rope, pages[:, :16])
    assert not decode_op.uses_gluon(latent[..., :256], rope, pages)


def test_pieces_come_in_waves():
    # 132 processors: 64 sequences of two head blocks fill them; fewer are cut until they do.
    assert decode_op.splits_in_waves(128, 512, 132) == 1
    assert decode_op.splits_in_waves(16, 512, 132) == 8
    assert decode_op.splits_in_waves(2, 2048, 132) == 64
    assert decode_op.splits_in_waves(2, 3, 132) == 3
    assert decode_op.splits_in_waves(1000, 512, 132) == 1


def _offsets(lengths, dtype=torch.int64):
    return torch.tensor((0, *lengths), device="cuda").cumsum(0).to(dtype)


# Four sequences each, so that few variants are compiled.
@_gpu
@pytest.mark.parametrize(("dtype", "tolerance"), HALVES)
@pytest.mark.parametrize(
    ("queries", "keys"),
    [
        ((1, 0, 0, 0), (1, 0, 0, 0)),
        ((130, 0, 1, 300), (500, 3, 7, 300)),
        ((128, 128, 65, 511), (128, 256, 333, 511)),
        ((127, 64, 3, 2), (127, 64, 129, 128)),
    ],
)
def test_prefill(queries, keys, dtype, tolerance):
    new = partial(_randn, dtype=dtype, device="cuda")
    q, k = new(sum(queries), 3, 192), new(sum(keys), 3, 192, seed=1)
    v = new(sum(keys), 3, 128, seed=2)
    named = {"scale": 192**-0.5, "cu_seqlens_q": _offsets(queries), "cu_seqlens_k": _offsets(keys)}
    call = partial(mla_prefill, q, k, v, **named)
    got, largest = call(return_max=True, out_dtype=torch.float32)
    expected, expected_max = prefill_reference(
        *(x.double() for x in (q, k, v)), **named, return_max=True
    )
    assert got.dtype == torch.float32
    assert relative_error(got, expected) < tolerance
    assert relative_error(largest, expected_max) < 1e-5
    assert torch.equal(call(), got.to(dtype))


@_gpu
def test_prefill_keeps_sequences_apart_and_reads_strided_heads():
    # k and v as parts of one projection, q as part of a wider one, offsets in 32 bits.
    lengths = (150, 77, 200)
    joined, wide = _randn(427, 3, 320, device="cuda"), _randn(427, 3, 256, device="cuda", seed=1)
    joined[150:227] = float("nan")
    (k, v), q = joined.split((192, 128), dim=-1), wide[..., 64:]
    offsets = _offsets(lengths, torch.int32)
    named = {"scale": 0.1, "cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
    got = mla_prefill(q, k, v, **named)
    expected = prefill_reference(q.double(), k.double(), v.double(), **named)
    assert got[150:227].isnan().all()
    for rows in (slice(0, 150), slice(227, 427)):
        assert relative_error(got[rows], expected[rows]) < 6e-3


def _gradients(function, inputs, d_out, named):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    return torch.autograd.grad(function(*leaves, **named), leaves, d_out)


@_gpu
@pytest.mark.parametrize(("dtype", "tolerance"), HALVES)
@pytest.mark.parametrize(
    ("queries", "keys"),
    [
        ((1, 0, 0, 0), (1, 0, 0, 0)),
        ((130, 0, 1, 300), (500, 3, 7, 300)),
        ((128, 128, 65, 511), (128, 256, 333, 511)),
        ((1100, 64, 3, 2), (1100, 64, 129, 128)),
    ],
)
def test_prefill_gradients(queries, keys, dtype, tolerance):
    new = partial(_randn, dtype=dtype, device="cuda")
    inputs = [
        new(sum(n), 3, width, seed=i)
        for i, (n, width) in enumerate(((queries, 192), (keys, 192), (keys, 128)))
    ]
    d_out = new(sum(queries), 3, 128, seed=3, dtype=torch.float32)
    named = {"scale": 192**-0.5, "cu_seqlens_q": _offsets(queries), "cu_seqlens_k": _offsets(keys)}
    call = partial(mla_prefill, out_dtype=torch.float32)
    got = _gradients(call, inputs, d_out, named)
    exact = [x.double() for x in inputs]
    expected = _gradients(prefill_reference, exact, d_out.double(), named)
    for g, e in zip(got, expected, strict=True):
        assert g.dtype == dtype
        # Keys that one query alone sees have no dS: what is left is rounding.
        assert float((g.double() - e).norm()) < 2 * tolerance * float(e.norm()) + 1e-3
    assert all(map(torch.equal, got, _gradients(call, inputs, d_out, named)))


@_gpu
def test_prefill_gradients_keep_sequences_apart():
    lengths = (150, 77, 200)
    joined, wide = _randn(427, 3, 320, device="cuda"), _randn(427, 3, 256, device="cuda", seed=1)
    joined[150:227], wide[150:227] = float("nan"), float("nan")
    offsets = _offsets(lengths, torch.int32)
    named = {"scale": 0.1, "cu_seqlens_q": offsets, "cu_seqlens_k": offsets}

    def attend(function, joined, wide):
        (k, v), q = joined.split((192, 128), dim=-1), wide[..., 64:]
        return function(q, k, v, **named)

    d_out = _randn(427, 3, 128, device="cuda", seed=2)
    got = _gradients(partial(attend, mla_prefill), (joined, wide), d_out, {})
    exact = joined.double(), wide.double()
    expected = _gradients(partial(attend, prefill_reference), exact, d_out.double(), {})
    for g, e in zip(got, expected, strict=True):
        for rows in (slice(0, 150), slice(227, 427)):
            assert relative_error(g[rows], e[rows]) < 8e-3


@_gpu
def test_prefill_gradients_are_captured():
    q, k, v = (_randn(300, 3, width, device="cuda", seed=width) for width in (192, 192, 128))
    named = {"scale": 0.1, "cu_seqlens_q": _offsets((300,)), "cu_seqlens_k": _offsets((300,))}
    d_out = _randn(300, 3, 128, device="cuda")
    expected = _gradients(mla_prefill, (q, k, v), d_out, named)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = _gradients(mla_prefill, (q, k, v), d_out, named)
    for _ in range(2):
        graph.replay()
        assert all(map(torch.equal, captured, expected))


@_gpu
@pytest.mark.parametrize(
    ("page", "num_heads", "splits", "half"),
    [(64, 96, 1, 0), (64, 96, 3, 0), (64, 96, 20, 0), (64, 96, 3, 1), (128, 5, 3, 0)],
)
def test_decode(page, num_heads, splits, half, monkeypatch):
    dtype, tolerance = HALVES[half]
    monkeypatch.setattr(decode_op, "splits_in_waves", lambda *args: splits)
    lengths, per_row = (1000, 0, 1, 64, 65, 1024), 1024 // page
    new = partial(_randn, dtype=dtype, device="cuda")
    latent, rope = new(6, num_heads, 512), new(6, num_heads, 64, seed=1)
    # A layer of a pool that holds two, full of NaN where nothing may be read.
    pool = new(6 * per_row, 2, page, 576, seed=2)
    pool[:, 0] = float("nan")
    pages = pool[:, 1]
    table = torch.randperm(6 * per_row, device="cuda").view(6, per_row)
    clean = pages.double()
    for row, length in enumerate(lengths):
        behind = table[row, -(-length // page) :]
        pages[behind] = float("nan")
        if length % page:
            pages[table[row, length // page], length % page :] = float("nan")
    counts = torch.tensor(lengths, device="cuda")
    scale = 192**-0.5
    expected = decode_reference(latent.double(), rope.double(), clean, table, counts, scale=scale)
    for row, length in enumerate(lengths):
        table[row, -(-length // page) :] = -1
    got = decode_op.mla_decode(latent, rope, pages, table, counts, scale=scale)
    assert relative_error(got, expected) < 2 * tolerance
    assert not got[1].any()


@_gpu
@pytest.mark.parametrize("splits", [1, 3])
def test_decode_rescales_when_scores_grow(splits, monkeypatch):
    # Each tile's scores are above those before it, in steps below and above the slack.
    monkeypatch.setattr(decode_op, "splits_in_waves", lambda *args: splits)
    latent, rope = torch.zeros(1, 96, 512), torch.zeros(1, 96, 64)
    latent[:, ::2, 0], latent[:, 1::2, 0] = 1.0, 40.0
    latent, rope = latent.to("cuda", torch.bfloat16), rope.to("cuda", torch.bfloat16)
    pages = _randn(16, 64, 576, device="cuda", seed=2)
    pages[..., 0] = torch.arange(1024, device="cuda").view(16, 64) / 32
    table, lengths = torch.arange(16, device="cuda")[None], torch.tensor([1000], device="cuda")
    expected = decode_reference(
        latent.double(), rope.double(), pages.double(), table, lengths, scale=1.0
    )
    got = decode_op.mla_decode(latent, rope, pages, table, lengths, scale=1.0)
    assert relative_error(got, expected) < 8e-3


@_gpu
def test_decode_is_replayed_while_lengths_grow(monkeypatch):
    monkeypatch.setattr(decode_op, "splits_in_waves", lambda *args: 3)
    latent, rope = _randn(2, 96, 512, device="cuda"), _randn(2, 96, 64, device="cuda", seed=1)
    pages, table = _randn(32, 64, 576, device="cuda"), torch.arange(32, device="cuda").view(2, 16)
    lengths = torch.tensor([100, 64], device="cuda")
    call = partial(decode_op.mla_decode, latent, rope, pages, table, lengths, scale=0.1)
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for grown in ([100, 64], [101, 65], [1024, 0]):
        lengths.copy_(torch.tensor(grown))
        graph.replay()
        assert torch.equal(out, call())
