"""Looking at the result of every op of a forward and backward, with the layer it belongs to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

OUTSIDE = "the loss"
"""The layer of what runs outside of every module."""
_UNWRITTEN = ("empty", "new_empty")
"""Ops (by the beginning of their names) whose result is whatever was in the memory."""
_FILLS = ("full", "full_like", "new_full", "fill", "masked_fill", "where", "scalar_tensor")
"""Ops that write infinities on purpose, as masks."""


@dataclass(frozen=True)
class Seen:
    """Where a result was seen. phase: forward or backward."""

    phase: str
    layer: str
    op: str


class Probe(TorchDispatchMode):
    """Hands every floating-point result of every op to `see`."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[str] = []
        """Modules whose forward runs, the innermost last."""
        self.backward_layer = OUTSIDE

    def see(self, result: Tensor, name: str, args: Any) -> None:
        """Look at one result of the op called `name` with `args`."""
        raise NotImplementedError

    def seen(self, op: str) -> Seen:
        """Where the op is that runs now."""
        if torch._C._current_graph_task_id() != -1:
            return Seen("backward", self.backward_layer, op)
        return Seen("forward", self.running[-1] if self.running else OUTSIDE, op)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Run the op and look at its results."""
        out = func(*args, **(kwargs or {}))
        name = str(func)
        if _base(name).startswith(_UNWRITTEN):
            return out.zero_()  # what happens to be there may be a NaN that nobody reads
        schema = getattr(func, "_schema", None)
        # An op that writes into its arguments has its results there.
        written = (args, kwargs) if schema is not None and schema.is_mutable else ()
        for leaf in tree_leaves((out, written)):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel():
                self.see(leaf.detach(), name, args)
        return out


class FirstBad(Probe):
    """Remembers the first NaN, or infinity that is not a mask's."""

    found: tuple[str, Seen] | None = None

    def see(self, result: Tensor, name: str, args: Any) -> None:
        """An infinity in the arguments was there before, so it is a mask's."""
        if self.found is not None:
            return
        if bool(result.isnan().any()):
            self.found = ("a NaN", self.seen(name))
        elif _base(name) not in _FILLS and bool(result.isinf().any()):
            floats = [
                one for one in tree_leaves(args) if isinstance(one, Tensor) and one is not result
            ]
            if not any(one.is_floating_point() and bool(one.isinf().any()) for one in floats):
                self.found = ("an infinity", self.seen(name))


class LargestByLayer(Probe):
    """Remembers the largest absolute value of every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.largest: dict[str, tuple[float, Seen]] = {}

    def see(self, result: Tensor, name: str, args: Any) -> None:
        """Keep the result's largest value when it is the layer's; infinities are masks."""
        finite = result[result.isfinite()]
        seen = self.seen(name)
        value = float(finite.abs().max()) if finite.numel() else 0.0
        if value > self.largest.get(seen.layer, (0.0, seen))[0]:
            self.largest[seen.layer] = (value, seen)


@contextmanager
def name_modules(model: nn.Module, probe: Probe) -> Iterator[None]:
    """Tell the probe which module runs; the gradient of a module's result begins its backward."""
    names = {module: name for name, module in model.named_modules()}
    named: dict[int, Tensor] = {}  # the tensors too: an id is unique among living ones only

    def enter(module: nn.Module, inputs: Any) -> None:
        probe.running.append(names.get(module, type(module).__name__))

    def leave(module: nn.Module, inputs: Any, outputs: Any) -> None:
        layer = probe.running.pop()

        def arrive(grad: Tensor) -> None:
            probe.backward_layer = layer

        for leaf in tree_leaves(outputs):
            # The innermost module that made it comes first.
            if isinstance(leaf, Tensor) and leaf.requires_grad and id(leaf) not in named:
                named[id(leaf)] = leaf
                leaf.register_hook(arrive)

    hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _base(name: str) -> str:
    """`masked_fill` of `aten.masked_fill_.Scalar`."""
    return name.split(".")[1].rstrip("_") if "." in name else name
