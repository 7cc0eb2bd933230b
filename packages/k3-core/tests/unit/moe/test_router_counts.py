"""What load balancers see of a router: every training pass once, of the tokens that count."""

import dataclasses

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from k3_core.config import K3Config
from k3_core.model import K3ForConditionalGeneration
from k3_core.model.batch import SequenceBatch
from k3_core.moe.router import Router
from k3_core.ops import OpSet
from k3_core.ops.route_topk.histogram import add_required_biases

TOKENS, EXPERTS, TOP_K, BINS = 11, 6, 2, 20
MASK = torch.arange(TOKENS) % 3 > 0


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


@pytest.fixture
def router() -> Router:
    text = dataclasses.replace(
        K3Config.preset("k3-test").text, num_experts=EXPERTS, num_experts_per_token=TOP_K
    )
    made = Router(text, OpSet.resolve(overrides={"kernel": "reference"}))
    generator = torch.Generator().manual_seed(0)
    torch.nn.init.normal_(made.e_score_correction_bias, std=0.2, generator=generator)
    made.histogram_EB = torch.zeros(EXPERTS, BINS, dtype=torch.int32)
    made.seen_E = torch.zeros(EXPERTS, dtype=torch.int64)

    def observer(routes, is_counted_T):
        one_Tk = torch.ones_like(routes.idx_Tk)
        if is_counted_T is not None:
            one_Tk = one_Tk * is_counted_T[:, None]
        made.seen_E.scatter_add_(0, routes.idx_Tk.flatten(), one_Tk.flatten())

    made.observer = observer
    return made.train()


def logits() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(TOKENS, EXPERTS, generator=generator, requires_grad=True)


def check_counts(router: Router, mask: Tensor | None, passes: int) -> None:
    """Both sorts of counts are those of `passes` passes over the tokens of the mask."""
    num_tokens = TOKENS if mask is None else int(mask.sum())
    assert router.histogram_EB.sum(1).tolist() == [passes * num_tokens] * EXPERTS
    assert int(router.seen_E.sum()) == passes * num_tokens * TOP_K
    seen = router.histogram_EB.clone()
    router.histogram_EB.zero_()
    router.seen_E.zero_()
    with torch.no_grad():
        router.eval()
        routes = router(logits())
        router.train()
        expected = torch.zeros_like(seen)
        add_required_biases(expected, routes, router.e_score_correction_bias, mask)
    assert torch.equal(seen, passes * expected)


def reentrant(function):
    return lambda *args: checkpoint(function, *args, use_reentrant=True)


def not_reentrant(function):
    return lambda *args: checkpoint(function, *args, use_reentrant=False)


def compiled(function):
    return torch.compile(function, fullgraph=True, backend="aot_eager")


WAYS = {
    "plain": lambda f: f,
    "reentrant": reentrant,
    "not reentrant": not_reentrant,
    "compiled": compiled,
    "checkpoint in a graph": lambda f: compiled(not_reentrant(f)),
    "graph in a checkpoint": lambda f: not_reentrant(compiled(f)),
    "graph in a reentrant one": lambda f: reentrant(compiled(f)),
}
CASES = [pytest.param(way, None, id=name) for name, way in WAYS.items()]
PADDED = ("plain", "not reentrant", "checkpoint in a graph")
CASES += [pytest.param(WAYS[name], MASK, id=f"{name}, padded") for name in PADDED]


@pytest.mark.parametrize(("way", "mask"), CASES)
def test_a_training_pass_counts_once(router, way, mask):
    def weights(logits_TE):
        return router(logits_TE, None, mask).weight_Tk.cos()  # its backward needs the weights

    step = way(weights)
    for _ in range(2):
        x = logits()
        step(x).sum().backward()
        assert x.grad.abs().sum() > 0
    check_counts(router, mask, passes=2)


class CarrySquares(torch.autograd.Function):
    """The first argument; in the backward the second, a loss, gets the gradient one."""

    @staticmethod
    def forward(ctx, weight_Tk, loss):
        return weight_Tk.view_as(weight_Tk)

    @staticmethod
    def backward(ctx, grad):
        return grad, torch.ones(())


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_an_auxiliary_gradient_enters_once_however_activations_are_computed(router, way):
    def gradient():
        x = logits()
        way(lambda logits_TE: router(logits_TE, None, MASK).weight_Tk.cos())(x).sum().backward()
        return x.grad

    plain = gradient()
    torch._dynamo.reset()
    router.auxiliary = lambda routes, mask_T: routes._replace(
        weight_Tk=CarrySquares.apply(
            routes.weight_Tk, (routes.scores_TE.square() * mask_T[:, None]).sum()
        )
    )
    scores = torch.sigmoid(logits().detach())
    squares = 2 * scores * scores * (1 - scores) * MASK[:, None]
    torch.testing.assert_close(gradient() - plain, squares)


def test_evaluation_and_replayed_routes_count_nothing(router):
    router.auxiliary = lambda routes, mask_T: pytest.fail("only a training pass has losses")
    routes = router.eval()(logits())
    router.train()(logits(), routes.idx_Tk)
    assert not router.histogram_EB.any() and not router.seen_E.any()


def test_padding_of_a_batch_reaches_the_routers():
    generator = torch.Generator().manual_seed(0)
    model = K3ForConditionalGeneration(K3Config.preset("k3-test"), generator=generator).train()
    routers = [module for module in model.modules() if isinstance(module, Router)]
    for router in routers:
        router.histogram_EB = torch.zeros(len(router.weight), BINS, dtype=torch.int32)
    batch = SequenceBatch.from_lengths((4, TOKENS - 4), is_counted_T=MASK)
    model.forward_packed(torch.arange(TOKENS), batch)
    counts = [router.histogram_EB[0].sum().item() for router in routers]
    layers = model.config.text.num_hidden_layers
    num_routers = sum(model.config.text.is_moe_layer(layer) for layer in range(layers))
    assert sorted(counts)[-num_routers:] == [int(MASK.sum())] * num_routers
