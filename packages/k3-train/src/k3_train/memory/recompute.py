"""Recompute: of an annotated function only its inputs are saved, it runs again in the backward.

Annotate modules, or ops by name for elementwise work (report 7.2). Autocast and the random
generators are as in the first run. Routers count a token once: they know a forward that runs in
a backward (`k3_core.recompute`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from k3_train.memory.base import MemoryPolicy
from k3_train.memory.scope import call_under


class Recompute(MemoryPolicy):
    """Nothing inside an annotated function is saved, so entries inside it have no effect."""

    runs_again = True

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run it, and once more in the backward."""
        # Lists may grow before it runs again, and policies around it see saved tensors only.
        leaves, structure = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        others = [None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves]

        def run(*tensors: Tensor) -> Any:
            left = iter(tensors)
            leaves = [next(left) if other is None else other[0] for other in others]
            args, kwargs = pytree.tree_unflatten(leaves, structure)
            return call_under(None, function, *args, **kwargs)

        return checkpoint(run, *tensors, use_reentrant=False)
