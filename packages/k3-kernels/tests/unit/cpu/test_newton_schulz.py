"""newton_schulz in the Gram form: hard spectra, shapes, what is the reference's."""

import pytest
import torch

from k3_core.ops.newton_schulz.reference import newton_schulz as reference
from k3_core.testing import relative_error
from k3_kernels.newton_schulz import cpu
from k3_kernels.newton_schulz.cpu import newton_schulz

SPECTRA = {
    "flat": torch.ones(24, dtype=torch.float64),
    "power": torch.arange(1, 25, dtype=torch.float64).reciprocal(),
    "decades": torch.logspace(0, -5, 24, dtype=torch.float64),
    "one-large": torch.tensor([1.0] + 23 * [2e-3], dtype=torch.float64),
    "low-rank": torch.tensor(6 * [1.0] + 18 * [1e-8], dtype=torch.float64),
}


def randn(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def matrices(spectrum, num_columns=96):
    left = torch.linalg.qr(randn(3, 24, 24))[0]
    right = torch.linalg.qr(randn(3, num_columns, 24, seed=1))[0]
    return left * SPECTRA[spectrum] @ right.mT


@pytest.mark.parametrize("spectrum", SPECTRA)
def test_bfloat16_is_exact_to_its_rounding(spectrum):
    """The plain iteration of bfloat16 matrices is 5 to 100 times further off."""
    x = matrices(spectrum).bfloat16()
    expected = reference(x.double())
    assert relative_error(newton_schulz(x), expected) < 2.5e-3
    assert relative_error(reference(x), expected) > 8e-3


@pytest.mark.parametrize("spectrum", SPECTRA)
def test_float32_keeps_the_precision_of_the_plain_iteration(spectrum):
    x = matrices(spectrum).float()
    expected = reference(x.double())
    plain = relative_error(reference(x), expected)
    assert relative_error(newton_schulz(x), expected) < 4 * plain + 1e-6


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("shape", [(5, 23), (23, 5), (2, 3, 4, 17), (3, 21, 4), (1, 7), (0, 2, 9)])
def test_shapes_and_steps(shape, steps):
    x = randn(*shape)
    torch.testing.assert_close(newton_schulz(x, steps=steps), reference(x, steps=steps))


def test_strided_stacks():
    x = randn(4, 12, 99)[::2, ::3, 1::2].mT
    torch.testing.assert_close(newton_schulz(x), reference(x))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_zero_stays_zero_beside_others(dtype):
    x = randn(3, 4, 18).float()
    x[1] = 0.0
    out = newton_schulz(x, dtype=dtype)
    assert (out[1] == 0).all() and out.isfinite().all() and out.dtype == torch.float32
    assert torch.equal(out[[0, 2]], newton_schulz(x[[0, 2]], dtype=dtype))


@pytest.mark.parametrize("scale", [1e-4, 1e6])
def test_the_scale_of_the_input_does_not_matter(scale):
    x = randn(2, 6, 30)
    torch.testing.assert_close(newton_schulz(x * scale), newton_schulz(x), rtol=1e-3, atol=1e-3)


def test_float16_gradients_and_square_matrices_are_the_references(monkeypatch):
    monkeypatch.setattr(cpu, "gram_form", None)
    for x in (randn(4, 20).half(), randn(4, 20).requires_grad_(), randn(8, 31)):
        assert torch.equal(newton_schulz(x), reference(x))
    with pytest.raises(ValueError, match=r"needs \[..., m, n\]"):
        newton_schulz(randn(3))
