"""Every implementation in a graph: torch.compile without breaks, torch's checks of custom ops, and
activation checkpointing.

On a CPU Triton's kernels are interpreted, and nothing is generated from the graphs. On a GPU the
implementations for it run, and inductor compiles what is around them.
"""

from functools import wraps

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from k3_core.custom_op.decorator import IMPLEMENTATIONS
from k3_core.plugins import Impl, ensure_plugins
from k3_core.testing import op_cases
from k3_core.testing.cases import Case
from k3_core.testing.compare import differences, run
from k3_core.testing.graphs import compare_compiled, opcheck
from k3_core.testing.values import Values

pytestmark = pytest.mark.usefixtures("small_expert_tiles")

IS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if IS_GPU else "cpu"
# Sums that inductor makes are in another order.
BACKEND, TOLERANCE = ("inductor", 1e-4) if IS_GPU else ("aot_eager", 1e-5)


def _can_run(impl: Impl) -> bool:
    if IS_GPU:
        return impl.devices == {"cuda"}
    return "cpu" in impl.devices or impl.name.endswith(".triton")


FOUND = [impl for impl in ensure_plugins().impls("kernel") if _can_run(impl)]
IMPLS = [pytest.param(impl, id=impl.name) for impl in FOUND]
DIFFERENTIABLE = [pytest.param(i, id=i.name) for i in FOUND if "backward" in i.features]


def cases_of(impl: Impl) -> list[Case]:
    return [case for case in op_cases(impl.implements) if case.features <= impl.features]


def compared(function, case, has_backward):
    """What differs between the compiled function and the plain one."""
    how = has_backward, BACKEND, TOLERANCE
    return list(compare_compiled(function, case, torch.float32, DEVICE, *how))


def under_checkpointing(function):
    @wraps(function)
    def run_twice(*args, **kwargs):
        return checkpoint(function, *args, use_reentrant=False, **kwargs)

    return run_twice


def is_traced(impl: Impl) -> bool:
    """Whether a graph holds what the implementation does: not a node, nor the loops' other form."""
    impl.load()
    return impl.name not in IMPLEMENTATIONS and not impl.name.endswith(".numba")


@pytest.mark.parametrize("impl", IMPLS)
def test_compiles_to_one_graph(impl):
    cases = cases_of(impl)
    for case in cases if is_traced(impl) else cases[:1]:
        assert not compared(impl.load(), case, False), case


@pytest.mark.parametrize("impl", DIFFERENTIABLE)
def test_compiles_with_gradients(impl):
    for case in cases_of(impl)[: 2 if is_traced(impl) else 1]:
        assert not compared(impl.load(), case, True), case


@pytest.mark.parametrize("impl", IMPLS)
def test_passes_the_checks_of_torch(impl):
    impl.load()
    if impl.name not in IMPLEMENTATIONS:
        pytest.skip("plain torch, which has no op of its own")
    assert opcheck(impl.name, cases_of(impl)[0], torch.float32, DEVICE)


@pytest.mark.parametrize("impl", DIFFERENTIABLE)
def test_is_the_same_under_checkpointing(impl):
    function, case = impl.load(), cases_of(impl)[0]
    call = case.make(Values(torch.float32, DEVICE))
    expected = run(function, case, call, True)
    assert not list(differences(run(under_checkpointing(function), case, call, True), expected, 0))
    assert not compared(under_checkpointing(function), case, True)
