"""Whether an implementation can be part of a graph: torch.compile, torch.library.opcheck."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from k3_core.custom_op.decorator import IMPLEMENTATIONS, register_once
from k3_core.custom_op.registration import NAMESPACE, name_of
from k3_core.testing.cases import Case
from k3_core.testing.compare import differences, run
from k3_core.testing.values import Values, map_tensors

CHECKS = "test_schema", "test_autograd_registration", "test_faketensor"
"""Those of torch that compile nothing."""


def compare_compiled(
    function: Callable[..., Any],
    case: Case,
    dtype: torch.dtype,
    device: str,
    has_backward: bool,
    backend: str = "aot_eager",
    tolerance: float = 1e-5,
) -> Iterator[str]:
    """One line for each result or gradient of the compiled function that is not the plain one's.

    Raises what torch.compile raises where the function does not fit into one graph.
    """
    torch._dynamo.reset()
    call = case.make(Values(dtype, device))
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    expected = run(function, case, call, has_backward)
    yield from differences(run(compiled, case, call, has_backward), expected, tolerance)


def opcheck(name: str, case: Case, dtype: torch.dtype, device: str) -> int:
    """Run torch's checks on the ops of an implementation that `custom_op` made; their number.

    name: `<op>.<variant>`. Raises what torch.library.opcheck raises.
    """
    own = IMPLEMENTATIONS[name]
    register_once(name)
    ops, op = getattr(torch.ops, NAMESPACE), name_of(own)
    call = case.make(Values(dtype, device)).map(lambda tensor: tensor.detach().clone())
    plain = own.signature.lower(own.signature.bind(call.args, call.kwargs))
    num_checked = 0
    if call.mutated:
        torch.library.opcheck(getattr(ops, f"{op}_").default, (*plain, None))
        return 1
    if own.forward is not None or not own.is_differentiable:
        torch.library.opcheck(getattr(ops, op).default, (*plain, None))
        num_checked = 1
    if not own.is_differentiable:
        return num_checked
    for leaf in call.leaves().values():
        leaf.requires_grad_()
    lists = (value if isinstance(value, list) else [value] for value in plain)
    needs = [x.requires_grad for own_list in lists for x in own_list if isinstance(x, Tensor)]
    args = (*plain, None) if own.forward is None else (*plain, None, needs)
    forward = getattr(ops, op if own.forward is None else f"{op}_forward").default
    results, saved = (forward(*args), []) if own.forward is None else forward(*args)
    torch.library.opcheck(forward, args, test_utils=_checks(results))
    kept = [*saved, *(results if own.reads_results else ())]
    grads = [torch.ones_like(x) if x.requires_grad else None for x in results]
    given = map_tensors(Tensor.detach, [*plain, None, kept, grads, needs])
    # In a graph it is whenever a call with gradients is compiled.
    torch.library.opcheck(getattr(ops, f"{op}_backward").default, tuple(given), test_utils=CHECKS)
    return num_checked + 2


def _checks(results: Sequence[Tensor]) -> Sequence[str]:
    """All of torch's; but that of gradients adds all results up in place of the first, which one of
    integers does not take."""
    return CHECKS if not results[0].is_floating_point() else (*CHECKS, "test_aot_dispatch_dynamic")
