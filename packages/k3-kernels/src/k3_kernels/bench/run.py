"""Time and error of every implementation of an op that can run here, beside its reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from k3_core.plugins import Impl, Request, ensure_plugins, resolve
from k3_core.plugins.filters import device_capability, reason_against
from k3_core.testing import Case, relative_error
from k3_core.testing.cases import flatten
from k3_core.testing.compare import run as results_of
from k3_core.testing.values import Call, Values
from k3_kernels.bench.clock import medians


@dataclass(frozen=True)
class Row:
    """One implementation on one call.

    has_backward: whether the gradients of all inputs are part of it. ratio: seconds of the
    reference in the same run over these. error: the largest relative error of a result (or of a
    gradient) against the reference in float64. is_chosen: what a model gets on this device.
    """

    op: str
    case: str
    impl: str
    has_backward: bool
    seconds: float
    ratio: float
    error: float
    is_chosen: bool


def bench(case: Case, device: str, dtype: torch.dtype, budget: float) -> Iterator[Row]:
    """Rows of one call, the reference first; forward, then with the backward where there is one."""
    impls = runnable(case.op, device, dtype)
    chosen = resolve("kernel", case.op, device=device, dtype=dtype).chosen
    call = case.make(Values(dtype, device))
    reference = next(impl for impl in impls if impl.is_reference)
    exact = call.map(lambda x: x.double() if x.is_floating_point() else x)
    for has_backward in (False, True):
        able = [i for i in impls if not has_backward or "backward" in i.features]
        if reference not in able:
            continue
        functions = {impl.name: impl.load() for impl in able}
        expected = results_of(reference.load(), case, exact, has_backward)
        make = _forward_backward if has_backward else _forward
        runs = {name: make(function, call) for name, function in functions.items()}
        seconds = medians(runs, device, budget)
        for name, function in functions.items():
            found = results_of(function, case, call, has_backward)
            yield Row(
                op=case.op,
                case=case.name,
                impl=name,
                has_backward=has_backward,
                seconds=seconds[name],
                ratio=seconds[reference.name] / seconds[name],
                error=max(_error(found[key], expected[key]) for key in expected),
                is_chosen=name == chosen.name,
            )


def runnable(op: str, device: str, dtype: torch.dtype) -> list[Impl]:
    """The implementations of an op that can run here, the reference first."""
    request = Request(
        kind="kernel",
        implements=op,
        device=device,
        dtype=str(dtype).removeprefix("torch."),
        capability=device_capability(device),
    )
    able = [i for i in ensure_plugins().impls("kernel", op) if not reason_against(i, request)]
    return sorted(able, key=lambda impl: (not impl.is_reference, impl.name))


def _forward(function: Callable[..., Any], call: Call) -> Callable[[], object]:
    own = call.map(lambda x: x.detach().clone())
    return torch.no_grad()(partial(function, *own.args, **own.kwargs))


def _forward_backward(function: Callable[..., Any], call: Call) -> Callable[[], object]:
    own = call.map(lambda x: x.detach().clone())
    leaves = [x.requires_grad_() for x in own.leaves().values()]

    def run() -> object:
        outputs = [x for x in flatten(function(*own.args, **own.kwargs)) if x.requires_grad]
        ones = [torch.ones_like(x) for x in outputs]
        return torch.autograd.grad(outputs, leaves, ones, allow_unused=True)

    return run


def _error(actual: Tensor, expected: Tensor) -> float:
    if actual.is_floating_point():
        return relative_error(actual, expected)
    return float((actual != expected).double().mean())
