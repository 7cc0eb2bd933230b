"""Run an op and its float64 reference on the same inputs and list what differs."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from k3_core.testing.cases import Case
from k3_core.testing.tolerance import GRADIENT_FACTOR, TOLERANCE, relative_error
from k3_core.testing.values import Call, Values

Results = dict[str, Tensor]


def compare_op(
    function: Any, reference: Any, case: Case, dtype: torch.dtype, device: str, has_backward: bool
) -> Iterator[str]:
    """One line for each result or gradient of `function` that is off."""
    call = case.make(Values(dtype, device))
    exact = call.map(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
    actual = run(function, case, call, has_backward)
    expected = run(reference, case, exact, has_backward)
    yield from differences(actual, expected, TOLERANCE[dtype])


def run(function: Callable[..., Any], case: Case, call: Call, has_backward: bool) -> Results:
    """Named results of one call, arguments written in place and gradients included."""
    own = call.map(lambda tensor: tensor.detach().clone())
    leaves = own.leaves() if has_backward else {}
    for leaf in leaves.values():
        leaf.requires_grad_()
    tensors = case.results(function(*own.args, **own.kwargs), own)
    results = {f"result {number}": tensor for number, tensor in enumerate(tensors)}
    results |= {f"written {slot}": own.get(slot) for slot in own.mutated}
    if leaves and any(tensor.numel() for tensor in tensors):
        results |= gradients(tensors, leaves)
    return results


def gradients(outputs: list[Tensor], leaves: Results) -> Results:
    """Gradients of a fixed random projection of the float outputs; zeros where none arrives."""
    generator = torch.Generator().manual_seed(1)
    total: Tensor | None = None
    for output in outputs:
        # Every output draws, so that the projection does not depend on which need a gradient.
        weight = torch.randn(output.shape, generator=generator, dtype=torch.float64)
        if output.requires_grad:
            part = (output.double() * weight.to(output.device)).sum()
            total = part if total is None else total + part
    if total is None:
        raise AssertionError("feature 'backward' is declared, but no result needs a gradient")
    found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    return {
        f"gradient of {name}": torch.zeros_like(leaf) if grad is None else grad
        for (name, leaf), grad in zip(leaves.items(), found, strict=True)
    }


def differences(actual: Results, expected: Results, tolerance: float) -> Iterator[str]:
    """One line for each named tensor that is missing, misshapen, or too far off."""
    if actual.keys() != expected.keys():
        yield f"gives {sorted(actual)}, the reference gives {sorted(expected)}"
    for name in actual.keys() & expected.keys():
        a, b = actual[name], expected[name]
        if a.shape != b.shape:
            yield f"{name}: shape {tuple(a.shape)}, the reference has {tuple(b.shape)}"
        elif not a.is_floating_point():
            if not torch.equal(a.to(b.dtype), b):
                yield f"{name}: {int((a != b).sum())} of {a.numel()} integers differ"
        else:
            allowed = tolerance * (GRADIENT_FACTOR if name.startswith("gradient") else 1.0)
            error = relative_error(a, b)
            if not error <= allowed:
                yield f"{name}: relative error {error:.2e}, allowed {allowed:.1e}"
