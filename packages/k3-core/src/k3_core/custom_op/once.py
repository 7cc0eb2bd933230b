"""Refusal of second derivatives by a backward that is written by hand."""

import torch


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
