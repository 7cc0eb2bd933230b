"""A warning for entries of `[memory]` that had no effect.

A norm that an op computes on the way is a module that nobody calls, and activation checkpointing
that does nothing is found by a look at the memory only.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING

from k3_train.events.base import TrainerEvent

if TYPE_CHECKING:
    from torch import Tensor

    from k3_train.config import TrainConfig
    from k3_train.loop.trainer import Trainer
    from k3_train.memory.scope import Scopes


class UnusedEntries(TrainerEvent):
    """Looks once, after the first step of a process."""

    def __init__(self, config: TrainConfig, scopes: Scopes) -> None:
        super().__init__(config)
        self._scopes: Scopes | None = scopes

    def stepped(self, trainer: Trainer, metrics: Mapping[str, Tensor]) -> None:
        """Warn of functions that were not called."""
        if self._scopes is not None and (names := list(self._scopes.unused)):
            more = f" and {len(names) - 3} others" if len(names) > 3 else ""
            warnings.warn(
                f"[memory]: the first step did not call {', '.join(names[:3])}{more}, so their "
                "entries change nothing; annotate the op that does the work, or the module around",
                stacklevel=2,
            )
        self._scopes = None
