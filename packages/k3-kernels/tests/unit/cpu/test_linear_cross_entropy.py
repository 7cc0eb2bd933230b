"""linear_cross_entropy in plain torch: gradients of chunks, labels that do not fit, autocast."""

import pytest
import torch

from k3_core.ops.linear_cross_entropy.reference import linear_cross_entropy as reference
from k3_kernels.linear_cross_entropy import chunks
from k3_kernels.linear_cross_entropy.cpu import linear_cross_entropy

REDUCTIONS = pytest.mark.parametrize("reduction", ["mean", "sum", "none"])


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Two tokens a chunk, so that seven make four chunks, one of them short."""
    monkeypatch.setattr(chunks, "chunk_tokens", lambda *_: 2)


def inputs(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, 5, generator=generator, dtype=torch.float64)
    weight = torch.randn(11, 5, generator=generator, dtype=torch.float64)
    leaves = [x.to(dtype).requires_grad_() for x in (hidden, weight)]
    return *leaves, torch.tensor([3, -100, 0, 10, -100, 3, 5])


@REDUCTIONS
@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_gradcheck(reduction, z_loss):
    hidden, weight, labels = inputs()

    def loss(h, w):
        return linear_cross_entropy(h, w, labels, reduction=reduction, z_loss=z_loss)

    assert torch.autograd.gradcheck(loss, (hidden, weight))


@REDUCTIONS
@pytest.mark.parametrize("ignored", [-100, 3, 1])
def test_incoming_gradients_scale(reduction, ignored):
    hidden, weight, labels = inputs()
    labels = labels.where(labels >= 0, ignored)
    found, expected = (
        torch.autograd.grad(
            (op(hidden, weight, labels, reduction=reduction, ignore_index=ignored) ** 2).sum(),
            (hidden, weight),
        )
        for op in (linear_cross_entropy, reference)
    )
    torch.testing.assert_close(found, expected)


@REDUCTIONS
@pytest.mark.parametrize("wanted", [0, 1])
def test_one_gradient_alone(reduction, wanted):
    *leaves, labels = inputs()
    leaves[1 - wanted] = leaves[1 - wanted].detach()
    found, expected = (
        torch.autograd.grad(op(*leaves, labels, reduction=reduction).sum(), leaves[wanted])
        for op in (linear_cross_entropy, reference)
    )
    torch.testing.assert_close(found, expected)


@REDUCTIONS
@pytest.mark.parametrize("num_tokens", [0, 3])
def test_nothing_counts(reduction, num_tokens):
    hidden, weight, _ = inputs()
    labels = torch.full((num_tokens,), -100)
    total = linear_cross_entropy(hidden[:num_tokens], weight, labels, reduction=reduction).sum()
    grads = torch.autograd.grad(total, (hidden, weight))
    assert float(total) == 0.0 and all((grad == 0).all() for grad in grads)


def test_one_pass_of_gradients_serves_two_backwards():
    hidden, weight, labels = inputs()
    loss = linear_cross_entropy(hidden, weight, labels)
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(2 * loss, (hidden, weight))
    torch.testing.assert_close([2 * grad for grad in first], list(second))


def test_no_gradients_are_made_where_none_are_wanted(monkeypatch):
    hidden, weight, labels = inputs()
    expected = reference(hidden, weight, labels)
    monkeypatch.setattr(torch.Tensor, "scatter_add_", None)
    with torch.no_grad():
        torch.testing.assert_close(linear_cross_entropy(hidden, weight, labels), expected)


@pytest.mark.parametrize("label", [-1, 11])
def test_a_label_outside_the_vocabulary_is_named(label):
    hidden, weight, labels = inputs()
    labels[4] = label
    with pytest.raises(IndexError, match=rf"label {label} of token 4 is outside .* of 11"):
        linear_cross_entropy(hidden, weight, labels)


def test_what_does_not_fit_is_named():
    hidden, weight, labels = inputs()
    with pytest.raises(ValueError, match="'median' is unknown"):
        linear_cross_entropy(hidden, weight, labels, reduction="median")
    for args in ((hidden, weight[:, :4], labels), (hidden, weight, labels[:5]), (hidden[0],) * 3):
        with pytest.raises(ValueError, match=r"are not \[T, D\], \[V, D\], \[T\]"):
            linear_cross_entropy(*args)
    with pytest.raises(RuntimeError, match=r"linear_cross_entropy\.reference"):
        total = linear_cross_entropy(hidden, weight, labels)
        torch.autograd.grad(total, hidden, create_graph=True)


@REDUCTIONS
def test_autocast_is_that_of_the_reference(reduction):
    hidden, weight, labels = inputs(torch.float32)
    results = []
    for op in (linear_cross_entropy, reference):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses = op(hidden, weight, labels, reduction=reduction)
        results.append([losses, *torch.autograd.grad(losses.sum(), (hidden, weight))])
    torch.testing.assert_close(*results, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("vocabulary", "tokens"), [(163_840, 2048), (50_000, 4096), (10**8, 256)])
def test_chunks_of_the_table(vocabulary, tokens, monkeypatch):
    monkeypatch.undo()
    assert chunks.chunk_tokens(vocabulary, torch.float32, "cuda") == tokens
