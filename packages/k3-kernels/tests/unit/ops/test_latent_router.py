"""latent_router: one product for latent and router logits, ragged and split."""

import pytest
import torch

from k3_core.ops.latent_router.reference import latent_router as reference
from k3_core.testing import relative_error
from k3_kernels.latent_router import op
from k3_kernels.latent_router.op import Tile, latent_router

SMALL = Tile(16, 16, 16, 1, 4, 2)


def _inputs(tokens: int, width: int, latent: int, experts: int, dtype: torch.dtype, device: str):
    generator = torch.Generator().manual_seed(0)
    shapes = (tokens, width), (latent, width), (experts, width)
    scales = (1.0, width**-0.5, width**-0.5)
    return tuple(
        (scale * torch.randn(*shape, generator=generator)).to(device, dtype)
        for shape, scale in zip(shapes, scales, strict=True)
    )


def _check(inputs, got) -> None:
    """The latent to its own rounding; the logits to that of float32, whatever the inputs are."""
    z, logits = got
    expected = reference(*(x.double() for x in inputs))
    assert (z.dtype, logits.dtype) == (inputs[0].dtype, torch.float32)
    rounding = {torch.float32: 1e-6, torch.float16: 4e-4, torch.bfloat16: 3e-3}[z.dtype]
    assert relative_error(z, expected[0]) < rounding
    assert relative_error(logits, expected[1]) < 3e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("tokens", [1, 16, 37])
def test_ragged_sizes(dtype, splits, tokens, device, monkeypatch):
    if dtype == torch.bfloat16 and device == "cpu":
        pytest.skip("the Triton interpreter has no bfloat16")
    monkeypatch.setattr(op, "choose_tile", lambda x: SMALL._replace(splits=splits))
    inputs = _inputs(tokens, 56, 24, 37, dtype, device)
    _check(inputs, latent_router(*inputs))


@pytest.mark.parametrize("tokens", [3, 70])
def test_tiles_of_the_table(tokens, device):
    inputs = _inputs(tokens, 64, 40, 24, torch.float16, device)
    _check(inputs, latent_router(*inputs))


def test_more_splits_than_steps(device, monkeypatch):
    monkeypatch.setattr(op, "choose_tile", lambda x: SMALL._replace(splits=4))
    inputs = _inputs(5, 24, 16, 8, torch.float32, device)
    _check(inputs, latent_router(*inputs))


def test_values_that_are_not_finite_stay_in_their_row(device, monkeypatch):
    monkeypatch.setattr(op, "choose_tile", lambda x: SMALL)
    x, *weights = _inputs(5, 32, 16, 8, torch.float32, device)
    x[2, 3] = float("nan")
    z, logits = latent_router(x, *weights)
    others = [0, 1, 3, 4]
    assert z[2].isnan().all() and logits[2].isnan().all()
    assert z[others].isfinite().all() and logits[others].isfinite().all()


def test_rows_of_a_wider_tensor(device, monkeypatch):
    monkeypatch.setattr(op, "choose_tile", lambda x: SMALL)
    wide, *weights = _inputs(6, 64, 16, 8, torch.float32, device)
    inputs = wide[::2, :32], *(w[:, :32] for w in weights)
    _check(inputs, latent_router(*inputs))


def test_no_tokens(device):
    z, logits = latent_router(*_inputs(0, 32, 16, 8, torch.float16, device))
    assert (z.shape, z.dtype) == ((0, 16), torch.float16)
    assert (logits.shape, logits.dtype) == ((0, 8), torch.float32)


def _mixed(dtype, device):
    """A 16-bit x beside float32 weights that no 16-bit format holds."""
    x, latent, router = _inputs(37, 56, 24, 40, torch.float32, device)
    return x.to(dtype), latent, 1.7 * router


@pytest.mark.parametrize("splits", [1, 3])
def test_a_router_in_float32_is_not_rounded(splits, device, monkeypatch):
    monkeypatch.setattr(op, "choose_tile", lambda x: SMALL._replace(splits=splits))
    x, latent, router = _mixed(torch.float16, device)
    z, logits = latent_router(x, latent.half(), router)
    assert z.dtype == torch.float16
    assert relative_error(logits, x.double() @ router.double().mT) < 1e-5


@pytest.mark.parametrize("needed", [(0, 1, 2), (0,), (1,), (2,)])
def test_gradients_under_autocast(needed, device, monkeypatch):
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    monkeypatch.setattr(op, "choose_tile", lambda x: SMALL)
    inputs = _mixed(dtype, device)
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(37, n, generator=generator).to(device) for n in (24, 40)]
    leaves = [t.clone().requires_grad_(i in needed) for i, t in enumerate(inputs)]
    with torch.autocast(device, dtype):
        results = latent_router(*leaves)
    wanted = [leaves[i] for i in needed]
    got = torch.autograd.grad(results, wanted, [grads[0].to(dtype), grads[1]], allow_unused=True)
    exact = [t.double().requires_grad_() for t in inputs]
    expected = torch.autograd.grad(reference(*exact), exact, [g.double() for g in grads])
    for number, g in zip(needed, got, strict=True):
        assert g.dtype == inputs[number].dtype
        assert relative_error(g, expected[number]) < (3e-3 if dtype == torch.bfloat16 else 5e-4)


@pytest.mark.parametrize("used", [0, 1])
def test_only_one_result_is_used(used, device, monkeypatch):
    monkeypatch.setattr(op, "choose_tile", lambda x: SMALL)
    leaves = [t.requires_grad_() for t in _inputs(5, 32, 16, 8, torch.float16, device)]
    got = torch.autograd.grad(
        latent_router(*leaves)[used].sum(), leaves, allow_unused=True, materialize_grads=True
    )
    exact = [t.detach().double().requires_grad_() for t in leaves]
    expected = torch.autograd.grad(
        reference(*exact)[used].sum(), exact, allow_unused=True, materialize_grads=True
    )
    for g, e in zip(got, expected, strict=True):
        assert torch.equal(g, e.half()) if not e.any() else relative_error(g, e) < 5e-4


def test_rows_off_the_boundaries_of_descriptors(device):
    inputs = _inputs(3, 33, 8, 5, torch.float32, device)
    _check(inputs, latent_router(*inputs))


def test_widths_that_do_not_fit(device):
    x, latent, router = _inputs(3, 32, 16, 8, torch.float32, device)
    with pytest.raises(ValueError, match=r"\(3, 32\), \(16, 32\), \(8, 16\)"):
        latent_router(x, latent, router[:, :16])
