"""newton_schulz by symmetric products: blocks, mirrors, pairs, norms, the choice."""

import pytest
import torch

from k3_core.ops.newton_schulz.reference import COEFFICIENTS
from k3_core.ops.newton_schulz.reference import newton_schulz as reference
from k3_core.testing import relative_error
from k3_kernels.newton_schulz import op
from k3_kernels.newton_schulz.forms import gram_form
from k3_kernels.newton_schulz.op import (
    PAIRS,
    Tile,
    make_factor,
    multiply_symmetric,
    newton_schulz,
    symmetric_form,
)

TILES = pytest.mark.parametrize("tile", [Tile(16, 32, 16, 4, 2), Tile(16, 16, 32, 4, 3)])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
ROUNDING = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 4e-3}


def randn(*shape, dtype, device):
    if dtype == torch.bfloat16 and device == "cpu":
        pytest.skip("the Triton interpreter has no bfloat16")
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).to(device, dtype)


def check_mirrors(found, tile):
    """What lies off the squares on the diagonal is made once."""
    square = torch.arange(found.shape[-1], device=found.device) // tile.columns
    is_apart = square[:, None] != square[None, :]
    assert torch.equal(found * is_apart, found.mT * is_apart)


@TILES
@DTYPES
@pytest.mark.parametrize("m", [8, 32, 40, 104])
def test_gram_matrix(tile, dtype, m, device, monkeypatch):
    monkeypatch.setattr(op, "TILE", tile)
    x = randn(2, m, 24, dtype=dtype, device=device)
    gram = multiply_symmetric(x)
    check_mirrors(gram, tile)
    assert relative_error(gram, x.double() @ x.double().mT) < ROUNDING[dtype]


@TILES
@DTYPES
@pytest.mark.parametrize("is_scaled", [False, True])
def test_factor_of_a_step(tile, dtype, is_scaled, device, monkeypatch):
    monkeypatch.setattr(op, "TILE", tile)
    x = randn(2, 56, 64, dtype=dtype, device=device) / 30
    gram = multiply_symmetric(x)
    scale = torch.tensor([0.5, 1.5], device=device).view(2, 1, 1) if is_scaled else None
    a, b, c = COEFFICIENTS
    s, g = (1.0 if scale is None else scale.double()), gram.double()
    one = torch.eye(56, device=device, dtype=torch.float64)
    expected = s * (a * one + b * s**2 * g + c * s**4 * g @ g)
    found = make_factor(gram, scale)
    check_mirrors(found, tile)
    assert relative_error(found, expected) < ROUNDING[dtype]


@pytest.mark.parametrize("tile", [Tile(16, 32, 16, 4, 2), Tile(32, 32, 32, 4, 3)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("m", [8, 37, 64])
def test_pairs_have_more_bits_than_their_halves(tile, dtype, m, device, monkeypatch):
    monkeypatch.setattr(op, "TILE_PAIRS", tile)
    x = randn(2, m, 80, dtype=dtype, device=device) / 30
    pairs, scale = PAIRS.gram(x, 1e-7)
    gram = x.double() @ x.double().mT
    scale_64 = 1 / gram.diagonal(dim1=-2, dim2=-1).sum(-1).sqrt().view(2, 1, 1)
    a, b, c = COEFFICIENTS
    one = torch.eye(m, device=device, dtype=torch.float64)
    unscaled = a * one + b * gram + c * gram @ gram
    scaled = gram * scale_64**2
    factor = PAIRS.factor(pairs, None)
    for found, expected in (
        (factor, unscaled),
        (PAIRS.factor(pairs, scale), scale_64 * (a * one + b * scaled + c * scaled @ scaled)),
        (PAIRS.multiply(factor, pairs), unscaled @ gram),
    ):
        assert relative_error(found.double().sum(2)[..., :m], expected) < 2e-5
        assert (found[..., m:] == 0).all()
    y = randn(2, m, 50, dtype=dtype, device=device)
    assert relative_error(PAIRS.apply(factor, y), unscaled @ y.double()) < ROUNDING[dtype] / 2


@pytest.mark.parametrize("shape", [(2, 24, 104), (1, 37, 200)])
def test_steps_on_pairs(shape, device, monkeypatch):
    monkeypatch.setattr(op, "TILE_PAIRS", Tile(16, 32, 16, 4, 2))
    x = 100 * randn(*shape, dtype=torch.float32, device=device)
    x[0, :, 0] = 0.0
    assert relative_error(gram_form(x, 5, 1e-7, PAIRS), reference(x.double())) < 1e-5
    assert (gram_form(torch.zeros_like(x), 5, 1e-7, PAIRS) == 0).all()


@pytest.mark.parametrize("shape", [(2, 40, 48), (1, 72, 200)])
def test_steps(shape, device, monkeypatch):
    monkeypatch.setattr(op, "TILE", Tile(16, 32, 16, 4, 2))
    x = 100 * randn(*shape, dtype=torch.float32, device=device)
    expected = reference(x.double())
    assert relative_error(symmetric_form(x, 5, 1e-7), expected) < 1e-5


def test_zero_stays_zero_beside_others(device, monkeypatch):
    monkeypatch.setattr(op, "TILE", Tile(16, 32, 16, 4, 2))
    x = randn(2, 24, 32, dtype=torch.float32, device=device)
    x[0] = 0.0
    out = symmetric_form(x, 5, 1e-7)
    assert (out[0] == 0).all()
    torch.testing.assert_close(out[1:], symmetric_form(x[1:], 5, 1e-7))


def test_memory_that_was_used_before_does_not_show(device, monkeypatch):
    monkeypatch.setattr(op, "TILE", Tile(16, 32, 16, 4, 2))
    new_empty = torch.Tensor.new_empty

    def poisoned(*args, **named):
        x = new_empty(*args, **named)
        return x.fill_(float("nan")) if x.is_floating_point() else x

    x = randn(2, 40, 48, dtype=torch.float32, device=device)
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    assert multiply_symmetric(x).isfinite().all()


@pytest.mark.parametrize(
    ("shape", "is_symmetric"),
    [
        ((3072, 3584), True),
        ((2, 7168, 512), True),
        ((1536, 1532), False),
        ((128, 7168), False),
        ((256, 256), False),
        ((7168,), False),
    ],
)
def test_shapes_of_the_symmetric_form(shape, is_symmetric):
    assert op.has_symmetric_form(torch.empty(shape, device="meta")) is is_symmetric


@pytest.mark.parametrize("shape", [(2, 24, 56), (2, 56, 24), (0, 8, 64)])
def test_long_bfloat16_matrices_take_pairs(shape, device, monkeypatch):
    x, taken = torch.ones(shape, device=device), []
    monkeypatch.setattr(op, "gram_form", lambda x, **named: taken.append(named["small"]) or x)
    newton_schulz(x, dtype=torch.bfloat16)
    newton_schulz(x[..., :16, :24], dtype=torch.bfloat16)
    assert taken == ([PAIRS] if x.numel() else [])


@pytest.mark.parametrize("is_tall", [False, True])
def test_bfloat16_of_any_stride_and_float32(is_tall, device, monkeypatch):
    """The op takes the symmetric form for the former; float32 stays exact."""
    wide = randn(2, 520, 544, dtype=torch.float32, device=device)[..., :536]
    x = wide.mT if is_tall else wide
    taken = []
    monkeypatch.setattr(op, "symmetric_form", lambda x, steps, eps: taken.append(x.shape) or x)
    newton_schulz(x, dtype=torch.bfloat16)
    assert taken == [(2, 520, 536)]
    few = x[:1, :20, :16]
    torch.testing.assert_close(newton_schulz(few), reference(few))
    assert len(taken) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(3, 520, 600), (2, 128, 1024), (1, 640, 520)])
def test_bfloat16_is_as_exact_as_the_plain_iteration(shape, device):
    x = randn(*shape, dtype=torch.bfloat16, device=device)
    expected = reference(x.double())
    plain = relative_error(reference(x), expected)
    assert relative_error(newton_schulz(x), expected) <= 1.1 * plain
