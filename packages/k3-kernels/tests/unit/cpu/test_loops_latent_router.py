"""latent_router as a loop: strides, rows alone, NaN, what the reference serves."""

import pytest
import torch

from k3_core.ops.latent_router.reference import latent_router as reference
from k3_core.testing import relative_error
from k3_kernels.latent_router import loops


def make(tokens, width=37, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)

    def rand(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return rand(tokens, width), rand(22, width), rand(9, width)


@pytest.fixture
def only_loops(monkeypatch):
    """Makes a call that loops do not take an error."""
    monkeypatch.setattr(loops, "reference", None)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-7), (torch.float64, 1e-15)])
@pytest.mark.parametrize("tokens", [0, 1, 8])
def test_against_the_reference(tokens, dtype, tolerance, only_loops):
    call = make(tokens, dtype=dtype)
    for got, expected in zip(
        loops.latent_router(*call), reference(*(x.double() for x in call)), strict=True
    ):
        assert got.dtype == dtype and got.shape == expected.shape
        assert relative_error(got, expected) < tolerance


def test_a_row_alone_is_the_same_and_nan_stays_in_it(only_loops):
    x, *weights = make(7)
    x[3, 5] = float("nan")
    wide = torch.cat((x, x), dim=-1)
    got = loops.latent_router(wide[:, :37], *weights)
    alone = [loops.latent_router(x[t : t + 1], *weights) for t in range(7)]
    for own, others in zip(got, zip(*alone, strict=True), strict=True):
        torch.testing.assert_close(own, torch.cat(others), rtol=0, atol=0, equal_nan=True)
        assert own.isnan().all(-1).tolist() == [t == 3 for t in range(7)]


def test_what_is_left_to_the_reference(monkeypatch):
    calls = []
    monkeypatch.setattr(loops.reference, "latent_router", lambda *args: calls.append(args))

    def is_left(x, *weights):
        calls.clear()
        loops.latent_router(x, *weights)
        return bool(calls)

    x, *weights = make(3)
    assert not is_left(x, *weights)
    assert is_left(x, weights[0], weights[1].double())
    assert is_left(x, *(w.mT.contiguous().mT for w in weights))
    assert is_left(x[:, :30], *weights)
    monkeypatch.setattr(loops, "MAX_PRODUCTS", 3 * 37 * 31)
    assert not is_left(x, *weights)
    monkeypatch.setattr(loops, "MAX_PRODUCTS", 3 * 37 * 31 - 1)
    assert is_left(x, *weights)
