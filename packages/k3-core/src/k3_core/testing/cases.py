"""A conformance case: a way to make a call of an op, and what it asks of an implementation."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from k3_core.testing.values import Call, Values

ALL_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
GROUPS = ("kda", "pointwise", "attention", "experts", "training")


def flatten(output: Any) -> list[Tensor]:
    """The tensors of a result, in order; None is left out."""
    if output is None:
        return []
    if isinstance(output, Tensor):
        return [output]
    return [tensor for item in output for tensor in flatten(item)]


@dataclass(frozen=True)
class Case:
    """One set of inputs for an op.

    features: what an implementation must declare to be asked. dtypes: activation dtypes in
    which the comparison makes sense. results: the tensors of an output that are compared; it
    sees the call too, so that an order that is free can be made canonical.
    """

    op: str
    name: str
    make: Callable[[Values], Call]
    features: frozenset[str] = frozenset()
    dtypes: tuple[torch.dtype, ...] = ALL_DTYPES
    results: Callable[[Any, Call], list[Tensor]] = lambda output, call: flatten(output)


def op_cases(op: str) -> list[Case]:
    """The cases of an op; an op without cases is an error in the battery itself."""
    modules = [importlib.import_module(f"k3_core.testing.cases_{group}") for group in GROUPS]
    found = [case for module in modules for case in module.CASES if case.op == op]
    if not found:
        raise LookupError(f"no conformance cases for op {op!r}; add them to k3_core.testing")
    return found
