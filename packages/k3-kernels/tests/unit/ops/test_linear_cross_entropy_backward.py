"""linear_cross_entropy by Triton: losses and gradients of chunks against the float64 reference."""

import pytest
import torch

from k3_core.ops.linear_cross_entropy.reference import linear_cross_entropy as reference
from k3_core.testing import relative_error
from k3_kernels.linear_cross_entropy import chunks, op
from k3_kernels.linear_cross_entropy.op import Tile, linear_cross_entropy

REDUCTIONS = pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
LIMITS = {torch.float32: (1e-5, 1e-4), torch.float16: (1e-3, 2e-3), torch.bfloat16: (5e-3, 8e-3)}
"""Of losses and of gradients."""
T, D, V = 21, 24, 75


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Chunks of 8 tokens and blocks of 32 logits, the last of each partly empty."""
    monkeypatch.setattr(chunks, "chunk_tokens", lambda *_: 8)
    monkeypatch.setattr(op, "TILE", Tile(32, 4))


def inputs(dtype, device, spread=3.0):
    if dtype == torch.bfloat16 and device == "cpu":
        pytest.skip("the Triton interpreter has no bfloat16")
    generator = torch.Generator().manual_seed(0)
    hidden = spread * torch.randn(T, D, generator=generator)
    weight = D**-0.5 * torch.randn(V, D, generator=generator)
    labels = torch.randint(V, (T,), generator=generator)
    labels[::5] = -100
    leaves = [x.to(device, dtype).requires_grad_() for x in (hidden, weight)]
    return *leaves, labels.to(device)


def results(function, hidden, weight, labels, **named):
    leaves = [x for x in (hidden, weight) if x.requires_grad]
    losses = function(hidden, weight, labels, **named)
    drawn = torch.randn(losses.shape, generator=torch.Generator().manual_seed(1))
    factors = drawn.to(losses.device, losses.dtype)
    return [losses, *torch.autograd.grad((losses * factors).sum(), leaves)]


def check(dtype, found, expected):
    for number, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert relative_error(a, b) < LIMITS[dtype][number > 0]


def exact(hidden, weight, labels, **named):
    leaves = [x.detach().double().requires_grad_(x.requires_grad) for x in (hidden, weight)]
    return results(reference, *leaves, labels, **named)


@DTYPES
@REDUCTIONS
@pytest.mark.parametrize("z_loss", [0.0, 0.05])
def test_losses_and_gradients(dtype, reduction, z_loss, device):
    args, named = inputs(dtype, device), {"reduction": reduction, "z_loss": z_loss}
    found = results(linear_cross_entropy, *args, **named)
    assert [x.dtype for x in found] == [torch.float32, dtype, dtype]
    check(dtype, found, exact(*args, **named))


@DTYPES
def test_logits_in_the_dtype_of_the_inputs(dtype, device):
    args = inputs(dtype, device, spread=1.0)
    check(dtype, results(linear_cross_entropy, *args, logits_dtype=dtype), exact(*args))


@REDUCTIONS
@pytest.mark.parametrize("wanted", [0, 1])
def test_one_gradient_alone(reduction, wanted, device):
    args = list(inputs(torch.float32, device))
    args[1 - wanted] = args[1 - wanted].detach()
    named = {"reduction": reduction}
    check(torch.float32, results(linear_cross_entropy, *args, **named), exact(*args, **named))


def test_strided_inputs(device):
    hidden, weight, labels = inputs(torch.float32, device)
    wide = torch.zeros(2 * T, 2 * D, device=device)
    wide[::2, ::2] = hidden.detach()
    args = wide[::2, ::2].requires_grad_(), weight.detach().T.contiguous().T.requires_grad_()
    pairs_T2 = torch.stack((labels, labels), dim=1)
    found = results(linear_cross_entropy, *args, pairs_T2[:, 0])
    check(torch.float32, found, exact(hidden, weight, labels))


@REDUCTIONS
@pytest.mark.parametrize("num_tokens", [0, 13])
def test_nothing_counts(reduction, num_tokens, device):
    hidden, weight, labels = inputs(torch.float16, device)
    few = hidden.detach()[:num_tokens].requires_grad_(), weight, labels[:num_tokens].fill_(-100)
    for result in results(linear_cross_entropy, *few, reduction=reduction):
        assert (result == 0).all()


def test_ignored_tokens_are_not_read(device):
    """Their logits may be infinite or NaN, as in rows of padding that nothing wrote."""
    hidden, weight, labels = inputs(torch.float32, device)
    with torch.no_grad():
        expected = linear_cross_entropy(hidden, weight, labels, reduction="none")
        hidden[0], hidden[5] = float("nan"), float("inf")
        found = linear_cross_entropy(hidden, weight, labels, reduction="none")
    assert torch.equal(found, expected)
    (grad,) = torch.autograd.grad(linear_cross_entropy(hidden, weight.detach(), labels), hidden)
    assert grad.isfinite().all() and (grad[::5] == 0).all()


def test_memory_that_was_used_before_does_not_show(device, monkeypatch):
    args = inputs(torch.float16, device)
    expected = results(linear_cross_entropy, *args)

    def poisoned(make):
        def made(*args, **named):
            x = make(*args, **named)
            return x.fill_(float("nan")) if x.is_floating_point() else x

        return made

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    assert all(map(torch.equal, results(linear_cross_entropy, *args), expected))


def test_results_repeat_bit_for_bit(device):
    args = inputs(torch.float16, device)
    first, second = (results(linear_cross_entropy, *args) for _ in range(2))
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("label", [-1, V, V + 31])
def test_a_label_outside_the_vocabulary_shows(label, device, monkeypatch):
    """On a GPU nobody looks at labels; the masked end of a row is not taken for a word."""
    monkeypatch.setattr(chunks, "_check_labels", lambda *_: None)
    hidden, weight, labels = inputs(torch.float32, device)
    labels[7] = label
    losses = linear_cross_entropy(hidden, weight, labels, reduction="none")
    (grad,) = torch.autograd.grad(losses.sum(), hidden)
    is_bad = torch.arange(T, device=device) == 7
    assert torch.equal(losses.isnan(), is_bad) and torch.equal(grad.isnan().all(1), is_bad)


def test_large_logits(device):
    args = inputs(torch.float32, device, spread=100.0)
    check(torch.float32, results(linear_cross_entropy, *args), exact(*args))


def test_other_dtypes_of_logits_are_refused(device):
    with pytest.raises(TypeError, match=r"logits_dtype torch\.float16 is neither float32"):
        linear_cross_entropy(*inputs(torch.float32, device), logits_dtype=torch.float16)
