"""A training step of k3-test as one graph, forward and backward, with counts of its routers.

On a GPU inductor compiles it, on a CPU nothing is generated from the graph.
"""

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from k3_core import K3Config, K3ForConditionalGeneration
from k3_core.model.batch import SequenceBatch
from k3_core.moe.router import Router

LENGTHS = (5, 1, 2)
NUM_BINS = 50
IS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if IS_GPU else "cpu"
# Sums that inductor makes are in another order.
BACKEND, LOSS, GRADIENT = ("inductor", 1e-5, 1e-3) if IS_GPU else ("aot_eager", 0.0, 1e-5)
STEPS = [(None, False), (None, True)] + ([] if IS_GPU else [("reference", False)])
"""Implementations of the kernels, and whether the step is checkpointed."""


def model_on(kernels: str | None) -> K3ForConditionalGeneration:
    overrides = {} if kernels is None else {"kernel": kernels}
    generator = torch.Generator().manual_seed(0)
    config = K3Config.preset("k3-test")
    model = K3ForConditionalGeneration(
        config, impl_overrides=overrides, generator=generator, device=DEVICE
    )
    for router in routers_of(model):
        router.histogram_EB = router.weight.new_zeros(
            len(router.weight), NUM_BINS, dtype=torch.int32
        )
    return model.train()


def routers_of(model: K3ForConditionalGeneration) -> list[Router]:
    return [module for module in model.modules() if isinstance(module, Router)]


def loss_of(model: K3ForConditionalGeneration, ids_T: Tensor, labels_T: Tensor) -> Tensor:
    batch = SequenceBatch.from_lengths(LENGTHS, device=ids_T.device)
    return model.training_loss(ids_T, labels_T, batch)[0]


def gradients(model: K3ForConditionalGeneration, step) -> tuple[Tensor, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    vocabulary, shape = model.config.text.vocab_size, (sum(LENGTHS),)
    ids_T, labels_T = (torch.randint(vocabulary, shape, generator=generator) for _ in range(2))
    model.zero_grad()
    loss = step(model, ids_T.to(DEVICE), labels_T.to(DEVICE))
    loss.backward()
    named = model.named_parameters()
    return loss.detach(), {name: p.grad.clone() for name, p in named if p.grad is not None}


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("kernels", "is_checkpointed"), STEPS)
def test_step_is_one_graph(kernels, is_checkpointed):
    def step(model, ids_T, labels_T):
        if not is_checkpointed:
            return loss_of(model, ids_T, labels_T)
        return checkpoint(loss_of, model, ids_T, labels_T, use_reentrant=False)

    torch._dynamo.reset()
    model = model_on(kernels)
    expected, plain = gradients(model, loss_of)
    counts = [router.histogram_EB.clone() for router in routers_of(model)]
    loss, found = gradients(model, torch.compile(step, fullgraph=True, backend=BACKEND))
    assert (loss - expected).abs() <= LOSS * expected and found.keys() == plain.keys()
    for name, grad in found.items():
        error = (grad - plain[name]).abs().max() / plain[name].abs().max().clamp(min=1e-12)
        assert error < GRADIENT, name
    for router, once in zip(routers_of(model), counts, strict=True):
        assert torch.equal(router.histogram_EB, 2 * once)
    assert sum(int(once.sum()) for once in counts) > 0
