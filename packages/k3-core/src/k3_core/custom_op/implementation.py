"""An implementation of an op: its functions, its slots, and its autograd outside a graph.

A slot is a tensor among the arguments that a gradient may reach: an argument, or one of a list.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from k3_core.custom_op.arguments import Signature, Values, flatten, unflatten
from k3_core.custom_op.once import refuse_second_derivative

Layout = dict[str, int | None]
"""The arguments that hold slots: how many for a list, None for a tensor."""
Gradients = Mapping[str, Any]
"""By argument: its gradient, None for zeros; for a list a sequence of that."""


class Needs(dict[str, Any]):
    """By argument: whether its gradient is wanted, for a list a tuple of that."""

    def __missing__(self, name: str) -> bool:
        return False


class Implementation:
    """What `custom_op` was given, and what the op's `meta` module says."""

    def __init__(
        self,
        name: str,
        run: Callable[..., Any],
        forward: Callable[..., tuple[Any, Sequence[Tensor]]] | None,
        backward: Callable[..., Gradients] | None,
        saved: Callable[..., Sequence[Tensor]] | None,
        is_differentiable: bool,
    ) -> None:
        self.name, self.run, self.forward = name, run, forward
        self.backward, self.saved, self.is_differentiable = backward, saved, is_differentiable
        self.op = name.partition(".")[0]
        read: Iterable[str] = () if backward is None else inspect.signature(backward).parameters
        self.read = frozenset(read)  # what the backward asks for by name
        self.reads_results = "results" in self.read

    @cached_property
    def module(self) -> ModuleType:
        """The op's `meta` module."""
        return import_module(f"k3_core.ops.{self.op}.meta")

    @cached_property
    def signature(self) -> Signature:
        """The op's parameters."""
        return Signature(self.op, self.module.meta)

    def unflatten(self, tensors: Sequence[Tensor], values: Values) -> Any:
        """The op's result from its tensors."""
        restore = getattr(self.module, "restore", None)
        if restore is not None:
            return restore(tensors, values)
        return unflatten(tensors, self.signature.result)

    @cached_property
    def constants(self) -> Sequence[int]:
        """Numbers of the results that have no gradient."""
        return getattr(self.module, "CONSTANT_RESULTS", ())

    def mark_constants(self, ctx: Any, tensors: Sequence[Tensor]) -> None:
        """Tell autograd which results have no gradient."""
        if self.constants:
            ctx.mark_non_differentiable(*(tensors[i] for i in self.constants if i < len(tensors)))

    def run_forward(self, values: Values, needs: Needs) -> tuple[Any, Sequence[Tensor]]:
        """The result, and what the backward needs beside arguments."""
        if self.forward is None:
            return self.run(**values), ()
        return self.forward(needs, **values)

    def run_backward(
        self,
        grads: Sequence[Tensor | None],
        kept: Sequence[Tensor],
        needs: Needs,
        values: Mapping[str, Any],
    ) -> Gradients:
        """The gradients; kept: what the forward saved and, where they are read, its results."""
        assert self.backward is not None
        if all(grad is None for grad in grads):
            return {}
        read = {name: value for name, value in values.items() if name in self.read}
        if self.reads_results:
            num_saved = len(kept) - len(grads)
            kept, read["results"] = kept[:num_saved], kept[num_saved:]
        return self.backward(grads, kept, needs, **read)

    def differentiable(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The call with its backward, as autograd runs it outside a graph."""
        values = self.signature.bind(args, kwargs)
        layout = layout_of(values)
        tensors = _Differentiable.apply(self, values, layout, *slots(values, layout))
        return self.unflatten(tensors, values)


def tensors_of(value: Any) -> Sequence[Tensor]:
    """The slots of an argument."""
    if isinstance(value, Tensor):
        return (value,)
    if isinstance(value, list | tuple) and value and isinstance(value[0], Tensor):
        return value
    return ()


def needs_grad(values: Iterable[Any]) -> bool:
    """Whether a gradient would flow through a call with these arguments."""
    if not torch.is_grad_enabled():
        return False
    for value in values:
        if isinstance(value, Tensor):
            if value.requires_grad:
                return True
        elif any(tensor.requires_grad for tensor in tensors_of(value)):
            return True
    return False


def layout_of(values: Values) -> Layout:
    """Which arguments of a call hold slots."""
    layout: Layout = {}
    for name, value in values.items():
        if isinstance(value, Tensor):
            layout[name] = None
        elif own := tensors_of(value):
            layout[name] = len(own)
    return layout


def slots(values: Mapping[str, Any], layout: Layout) -> list[Any]:
    """What is given by argument, in order of the slots; None where an argument is missing."""
    flat: list[Any] = []
    for name, count in layout.items():
        value = values.get(name)
        if count is None:
            flat.append(value)
        else:
            flat.extend([None] * count if value is None else value)
    return flat


def by_argument(flat: Sequence[Any], layout: Layout) -> Needs:
    """The inverse of `slots`."""
    found, first = Needs(), 0
    for name, count in layout.items():
        end = first + (count or 1)
        found[name] = flat[first] if count is None else tuple(flat[first:end])
        first = end
    return found


class _Differentiable(torch.autograd.Function):
    """Keeps what the implementation's forward saves and the arguments that its backward names."""

    @staticmethod
    def forward(
        ctx: Any, own: Implementation, values: Values, layout: Layout, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        result, saved = own.run_forward(values, by_argument(ctx.needs_input_grad[3:], layout))
        # An argument that is returned as it is comes back from `unflatten`.
        given = {id(tensor) for tensor in tensors}
        results = [x for x in flatten(result) if id(x) not in given]
        own.mark_constants(ctx, results)
        kept = [*saved, *(results if own.reads_results else ())]
        ctx.own, ctx.layout, ctx.num_kept = own, layout, len(kept)
        ctx.constants = {n: values[n] for n in own.read if n in values and n not in layout}
        read = {name: values[name] for name in layout if name in own.read}
        ctx.save_for_backward(*kept, *slots(read, layout))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        own: Implementation = ctx.own
        refuse_second_derivative(own.op)
        tensors = ctx.saved_tensors  # of a checkpoint, which gives them once
        kept, read = tensors[: ctx.num_kept], tensors[ctx.num_kept :]
        values = ctx.constants | by_argument(read, ctx.layout)
        needs = by_argument(ctx.needs_input_grad[3:], ctx.layout)
        found = own.run_backward(grads, kept, needs, values)
        return None, None, None, *slots(found, ctx.layout)
