"""The decorator: run plainly, or become a node of the graph that is being traced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from itertools import chain
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from k3_core.custom_op.implementation import Gradients, Implementation, needs_grad
from k3_core.custom_op.once import once_in_graphs
from k3_core.custom_op.registration import register, traced

Function = TypeVar("Function", bound=Callable[..., Any])

IMPLEMENTATIONS: dict[str, Implementation] = {}
"""Those that are imported, by name."""
_registered: set[str] = set()


def custom_op(
    name: str,
    *,
    forward: Callable[..., tuple[Any, Sequence[Tensor]]] | None = None,
    backward: Callable[..., Gradients] | None = None,
    saved: Callable[..., Sequence[Tensor]] | None = None,
    is_differentiable: bool = True,
) -> Callable[[Function], Function]:
    """Make a function with an op's signature the implementation `name` (`<op>.<variant>`) of it.

    Without `backward` the function is differentiable itself, and a graph's backward runs it again.

    With it the function is asked for values only. `backward(grads, saved, needs, **arguments)`
    takes the gradients of its results (None where there is none), what `forward` saved, what is
    needed, and of the op's arguments those that it names: nothing else is kept. It returns
    gradients by argument. `forward(needs, **arguments)`, if given, runs in place of the function
    where gradients are needed and returns (result, saved tensors); `saved`, with the same
    arguments, returns empty tensors like those.
    """

    def decorate(run: Function) -> Function:
        own = Implementation(name, run, forward, backward, saved, is_differentiable)
        IMPLEMENTATIONS[name] = own

        @wraps(run)
        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                register_once(name)
                return traced(own, args, kwargs)
            if backward is None or not torch.is_grad_enabled():
                return run(*args, **kwargs)
            if not needs_grad(chain(args, kwargs.values())):
                return run(*args, **kwargs)
            return own.differentiable(args, kwargs)

        return cast(Function, call)

    return decorate


@once_in_graphs
def register_once(name: str) -> bool:
    """Registers on first use: a definition costs more than an import should."""
    if name not in _registered:
        _registered.add(name)
        register(IMPLEMENTATIONS[name])
    return True
