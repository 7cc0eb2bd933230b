"""route_topk in training: gradients and the histogram of required biases, against float64."""

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from k3_core.custom_op.decorator import register_once
from k3_core.ops.route_topk.reference import route_topk as reference
from k3_core.testing import relative_error
from k3_kernels.route_topk.op import route_topk

TOKENS, EXPERTS, TOP_K, BINS = 5, 40, 3, 50
NAMED = {"top_k": TOP_K, "renormalize": True, "scaling_factor": 2.5}


def randn(*shape: int, device: str, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def bias_on(device: str) -> Tensor:
    return 0.2 * randn(EXPERTS, device=device, seed=1)


def empty_counts(device: str, num_bins: int = BINS) -> Tensor:
    return torch.zeros(EXPERTS, num_bins, dtype=torch.int32, device=device)


def gradient(function, logits: Tensor, used: str, **named) -> Tensor:
    """Of a fixed projection of the results that `used` names."""
    x = logits.detach().requires_grad_()
    bias = bias_on(logits.device).to(logits.dtype)
    routes = function(x, bias, **{**NAMED, **named})
    total = x.new_zeros(())
    for seed, name in enumerate(("weight_Tk", "scores_TE")):
        if name in used:
            value = getattr(routes, name)
            total = total + (value * randn(*value.shape, device=x.device, seed=seed)).sum()
    return torch.autograd.grad(total, x)[0]


@pytest.mark.parametrize("activation", ["sigmoid", "softmax"])
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("used", ["weight_Tk", "scores_TE", "weight_Tk scores_TE"])
def test_gradients(used, renormalize, activation, device):
    logits = randn(TOKENS, EXPERTS + 3, device=device)[:, :EXPERTS]  # rows with a stride
    named = {"renormalize": renormalize, "activation": activation}
    got = gradient(route_topk, logits, used, **named)
    expected = gradient(reference, logits.double(), used, **named)
    assert relative_error(got, expected) < 1e-6


@pytest.mark.parametrize("tokens", [0, 9])
def test_gradients_of_an_incomplete_tile(tokens, device):
    logits = randn(tokens, EXPERTS, device=device)
    got, again = (gradient(route_topk, logits, "weight_Tk") for _ in range(2))
    expected = gradient(reference, logits.double(), "weight_Tk")
    assert torch.equal(got, again)
    assert got.shape == logits.shape
    assert tokens == 0 or relative_error(got, expected) < 1e-6


def test_second_derivatives_are_refused(device):
    x = randn(3, EXPERTS, device=device).requires_grad_()
    total = route_topk(x, bias_on(device), **NAMED).weight_Tk.square().sum()
    with pytest.raises(RuntimeError, match=r"route_topk\.reference"):
        torch.autograd.grad(total, x, create_graph=True)


@pytest.mark.parametrize("num_bins", [7, 1000])
@pytest.mark.parametrize("is_masked", [True, False])
@pytest.mark.parametrize("activation", ["sigmoid", "softmax"])
def test_histogram(activation, is_masked, num_bins, device):
    # Counts of another GPU's sigmoid may differ where a value lies on the edge of a bin.
    logits, bias = randn(TOKENS, EXPERTS, device=device), bias_on(device)
    mask = randn(TOKENS, device=device, seed=2) > 0 if is_masked else None
    before = torch.arange(EXPERTS * num_bins, dtype=torch.int32, device=device) % 7
    found = [before.view(EXPERTS, num_bins).clone() for _ in range(3)]
    named = {**NAMED, "activation": activation, "is_counted_T": mask}
    with_gradients = logits.clone().requires_grad_()
    route_topk(logits, bias, histogram_EB=found[0], **named)
    route_topk(with_gradients, bias, histogram_EB=found[1], **named)
    reference(logits.double(), bias.double(), histogram_EB=found[2], **named)
    assert torch.equal(found[0], found[1])
    added, expected = (counts - before.view_as(counts) for counts in (found[0], found[2]))
    assert (added.sum(1) == (TOKENS if mask is None else int(mask.sum()))).all()
    assert (added != expected).sum() <= 4
    assert (added.cumsum(1) - expected.cumsum(1)).abs().max() <= 1


def test_rows_that_are_not_finite_count_once_in_the_range(device):
    logits = randn(4, EXPERTS, device=device)
    logits[0], logits[1, 3], logits[2, 5] = float("nan"), float("inf"), float("nan")
    found, expected = empty_counts(device), empty_counts(device)
    route_topk(logits, bias_on(device), histogram_EB=found, **NAMED)
    reference(logits, bias_on(device), histogram_EB=expected, **NAMED)
    assert torch.equal(found, expected) and (found.sum(1) == 4).all()


def test_what_cannot_count_is_named(device):
    logits, bias = randn(2, EXPERTS, device=device), bias_on(device)
    with pytest.raises(ValueError, match="must be contiguous, int32"):
        route_topk(logits, bias, histogram_EB=empty_counts(device).float(), **NAMED)


def counting_step(x: Tensor, bias: Tensor, counts: Tensor, mask: Tensor) -> Tensor:
    routes = route_topk(x, bias, histogram_EB=counts, is_counted_T=mask, **NAMED)
    return routes.weight_Tk.cos().sum() + routes.scores_TE.square().sum()


def in_checkpoint(*args: Tensor) -> Tensor:
    return checkpoint(counting_step, *args, use_reentrant=False)


@pytest.mark.parametrize("step", [counting_step, in_checkpoint])
def test_counts_and_differentiates_in_one_graph(step, device):
    torch._dynamo.reset()
    bias, mask = bias_on(device), torch.arange(TOKENS, device=device) % 4 > 0
    found = []
    for function in (counting_step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        x, counts = randn(TOKENS, EXPERTS, device=device).requires_grad_(), empty_counts(device)
        loss = function(x, bias, counts, mask)
        loss.backward()
        found.append((loss.detach(), x.grad, counts))
    torch.testing.assert_close(found[1][:2], found[0][:2])
    assert torch.equal(found[1][2], found[0][2]) and found[0][2].any()


def test_the_op_that_counts_passes_the_checks_of_torch(device):
    register_once("route_topk.triton")
    mask = torch.arange(TOKENS, device=device) % 4 > 0
    routing = (TOP_K, True, 2.5, 1, 1, "sigmoid")
    args = randn(TOKENS, EXPERTS, device=device), bias_on(device), *routing
    op = torch.ops.k3.route_topk_triton_.default
    torch.library.opcheck(op, (*args, empty_counts(device), mask, None))
