"""Two parts of a layer at once, on two streams of a GPU (serving.md 3, fewer serial launches)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor


def beside(function: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
    """Begin `function` and return what gives its result.

    In a CUDA graph that is being captured it becomes a branch of its own, beside what the caller
    runs before it asks for the result: a small batch leaves most of a GPU free. Anywhere else the
    host is what launches wait for, or there is no second stream, and it runs at once.
    """
    is_traced = torch.compiler.is_compiling()
    if is_traced or device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        result = function()
        return lambda: result
    main, side = torch.cuda.current_stream(device), _side_stream(device)
    # Memory that the branch frees is taken by branches only, and each waits here.
    side.wait_stream(main)
    with torch.cuda.stream(side):
        result = function()

    def join() -> Tensor:
        main.wait_stream(side)
        return result

    return join


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
