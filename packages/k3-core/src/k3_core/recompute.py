"""Activation checkpointing: what a module counts must not be counted again by a recomputation.

A forward that runs inside a backward is one: autograd only runs a model again to recompute what it
did not keep. A compiled function cannot ask when it is traced, it may be recomputed as a whole; so
a graph asks when it runs.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from k3_core.custom_op.once import once_in_graphs


def is_recompute() -> bool:
    """Whether this call recomputes; False while a graph is traced, see `first_pass`."""
    return not torch.compiler.is_compiling() and _is_in_backward()


def first_pass(rows_T: Tensor | None, like: Tensor) -> Tensor | None:
    """Bool [T] of the rows to count, given that `is_recompute` is False.

    Plainly these are the given rows (None for all). In a graph they are none when the graph runs
    to recompute. `like` is a tensor of T rows on the device.
    """
    if not torch.compiler.is_compiling():
        return rows_T
    _register()
    is_first = torch.ops.k3.is_first_pass.default(like)
    return is_first.expand(like.shape[0]) if rows_T is None else rows_T & is_first


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


@once_in_graphs
def _register() -> bool:
    """Registers on first use: a definition costs more than an import should."""
    return _define()


@cache
def _define() -> bool:
    op = torch.library.custom_op(
        "k3::is_first_pass",
        lambda like: torch.full((), not _is_in_backward(), device=like.device),
        mutates_args=(),
        schema="(Tensor like) -> Tensor",
    )
    op.register_fake(lambda like: like.new_empty((), dtype=torch.bool))
    return True
