"""What is done once: a derivative of a backward that is written by hand, a call while a graph is
traced."""

from collections.abc import Callable
from typing import TypeVar

import torch

Function = TypeVar("Function", bound=Callable)


def refuse_second_derivative(op: str) -> None:
    """Call first in a backward: raises RuntimeError when its result should be differentiable.

    `torch.autograd.function.once_differentiable` refuses only when the incoming gradient itself
    needs a gradient, and else drops the second derivative silently.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{op}: its backward cannot be differentiated (create_graph=True); "
            f"choose the implementation {op}.reference for second derivatives"
        )


def once_in_graphs(function: Function) -> Function:
    """Has a graph call the function when it is traced and keep the result.

    `torch.compiler.assume_constant_result` is the same, and imports torch's compiler with triton:
    two seconds of every start.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
