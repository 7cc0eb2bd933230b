"""Calls of a training step under autocast, with its mixed dtypes, reach the kernels.

They did not: the mix over depth and the router ran in plain torch, a quarter of the step.
"""

from functools import wraps
from importlib import import_module
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from k3_core import K3Config, K3ForConditionalGeneration
from k3_core.custom_op.arguments import flatten
from k3_core.model.batch import SequenceBatch
from k3_core.ops import OP_NAMES
from k3_core.plugins import ensure_plugins
from k3_core.testing.values import Call

pytestmark = pytest.mark.usefixtures("small_expert_tiles")

LENGTHS = (3, 1, 2)
# A linear layer of many tokens is torch's product; segments are of context parallelism.
KERNELS = {
    impl.implements: impl
    for impl in ensure_plugins().impls("kernel")
    if impl.name.endswith(".triton")
    and "backward" in impl.features
    and impl.implements not in {"linear", "kda_segment"}
}


@pytest.fixture(scope="module")
def dtype(device):
    """Of autocast: the Triton interpreter has no bfloat16."""
    return torch.bfloat16 if device == "cuda" else torch.float16


@pytest.fixture(scope="module")
def calls(dtype):
    """By op the calls of a step of k3-test on a CPU, one for each list of dtypes."""
    generator = torch.Generator().manual_seed(0)
    config = K3Config.preset("k3-test")
    model = K3ForConditionalGeneration(config, generator=generator).train()
    found: dict[str, dict[tuple, Call]] = {name: {} for name in OP_NAMES}

    def recording(name, function):
        @wraps(function)
        def record(*args, **named):
            call = Call(args, named)
            found[name].setdefault(tuple(t.dtype for t in tensors_of(call)), call)
            return function(*args, **named)

        return record

    for name in OP_NAMES:
        setattr(model.ops, name, recording(name, getattr(model.ops, name)))
    ids_T = torch.randint(config.text.vocab_size, (sum(LENGTHS),), generator=generator)
    with torch.autocast("cpu", dtype):
        model.training_loss(ids_T, ids_T, SequenceBatch.from_lengths(LENGTHS))
    return found


def tensors_of(call: Call) -> list[Tensor]:
    found: list[Tensor] = []
    call.map(lambda tensor: found.append(tensor) or tensor)
    return found


@pytest.mark.parametrize("op", KERNELS)
def test_no_call_runs_in_plain_torch(op, calls, dtype, device, monkeypatch):
    function = KERNELS[op].load()

    def refuse(*args, **named):
        raise AssertionError(f"{op} in plain torch")

    plain = f"k3_core.ops.{op}.reference", f"k3_kernels.{op}.cpu", f"k3_kernels.{op}.torch_cuda"
    for module in filter(find_spec, plain):
        monkeypatch.setattr(import_module(module), op, refuse)
    assert calls[op]
    for call in calls[op].values():
        needs = [tensor.requires_grad for tensor in tensors_of(call)]
        own = call.map(lambda tensor: tensor.detach().to(device))
        leaves = [t for t, need in zip(tensors_of(own), needs, strict=True) if need]
        for leaf in leaves:
            leaf.requires_grad_()
        with torch.autocast(device, dtype):
            results = flatten(function(*own.args, **own.kwargs))
        trained = [result for result in results if result.requires_grad]
        grads = torch.autograd.grad(trained, leaves, [torch.ones_like(r) for r in trained])
        assert all(g.dtype == leaf.dtype for g, leaf in zip(grads, leaves, strict=True))
        assert all(tensor.isfinite().all() for tensor in (*results, *grads))
