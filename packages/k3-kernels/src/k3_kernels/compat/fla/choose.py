"""The op that the registry chooses for a tensor, kept: fla's functions have no place to bind it."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from torch import Tensor

from k3_core.plugins import resolve
from k3_core.plugins.overrides import env_variable


def op_for(op: str, x: Tensor) -> Callable[..., Any]:
    """The implementation of `op` for the device and dtype of `x`.

    `K3_IMPL_KERNEL` and `K3_IMPL_KERNEL_<OP>` name another one, as everywhere in K3. Raises
    `ImplUnavailable` when what they name cannot run.
    """
    variables = env_variable("kernel"), env_variable("kernel", op)
    named = tuple(os.environ.get(variable) for variable in variables)
    return _resolved(op, x.device.type, str(x.dtype), named)


@lru_cache(maxsize=64)
def _resolved(op: str, device: str, dtype: str, named: tuple[str | None, ...]) -> Callable:
    function: Callable = resolve("kernel", op, device=device, dtype=dtype).load()
    return function
