"""A row of benchmarks/kernels_ops.py, and the choices that its sweep tries."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import kernels_ops_cases as cases
import torch


@dataclass
class Row:
    """configs: each chooses a tile and returns its name. Figures in microseconds."""

    name: str
    make: Callable[[bool, str, torch.dtype], cases.Case]
    public: float | None = None
    target: float | None = None
    configs: tuple[Callable[[], str], ...] = ()


def choose(owner: object, name: str, value: object) -> str:
    """Set one entry of a config table."""
    if isinstance(owner, dict):
        owner[name] = value
    else:
        setattr(owner, name, value)
    return getattr(value, "__name__", str(value))


def choices(owner: object, name: object, values: list) -> tuple[Callable[[], str], ...]:
    """One config for each value."""
    return tuple(partial(choose, owner, name, value) for value in values)
