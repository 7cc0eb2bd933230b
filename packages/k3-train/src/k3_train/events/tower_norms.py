"""Gradient norms by tower, in the rows of a run whose data has pictures (training 4)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from k3_train.events.base import TrainerEvent

if TYPE_CHECKING:
    from k3_train.config import TrainConfig
    from k3_train.loop.trainer import Trainer

TOWERS = {"text": "language_model", "vision": "vision_tower", "projector": "mm_projector"}
"""Name in the rows, and the module of the model."""


class TowerNorms(TrainerEvent):
    """`grad_norm_text`, `grad_norm_vision` and `grad_norm_projector`: means before clipping.

    Their squares add up to that of the whole gradient's norm, step by step. A tower that a step
    did not use counts 0.
    """

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self._of_step: Tensor | None = None
        self._sum: Tensor | None = None
        self._num_steps = 0

    def gradients(self, trainer: Trainer) -> None:
        """Take the norms of a step, which may yet be skipped."""
        norms = []
        for name in TOWERS.values():
            tower = getattr(trainer.state.model, name)
            params = () if tower is None else tower.parameters()
            grads = [param.grad for param in params if param.grad is not None]
            norms.append(nn.utils.get_total_norm(grads).to(trainer.stepper.device))
        self._of_step = torch.stack(norms)

    def stepped(self, trainer: Trainer, metrics: Mapping[str, Tensor]) -> None:
        """Count the step."""
        assert self._of_step is not None
        self._sum = self._of_step if self._sum is None else self._sum + self._of_step
        self._num_steps += 1

    def row_values(self, trainer: Trainer) -> Mapping[str, float]:
        """Means over the steps since the last row."""
        if self._sum is None:
            return {}
        means = (self._sum / self._num_steps).tolist()
        self._sum, self._num_steps = None, 0
        return {f"grad_norm_{name}": mean for name, mean in zip(TOWERS, means, strict=True)}
