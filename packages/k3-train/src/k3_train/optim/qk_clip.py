"""QK-Clip: attention scores that grow too large are scaled down in the weights (report 5, K2).

L attention layers of softmax, H heads. KDA normalises its queries and keys and needs none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from k3_train.events.base import TrainerEvent

if TYPE_CHECKING:
    from k3_train.config import TrainConfig
    from k3_train.loop.trainer import Trainer


class QKClip(TrainerEvent):
    """After each update, multiplies the scores of a head by tau / S where S > tau.

    S is the largest scaled score of the head in the forward passes of the step, over all
    micro-batches. A maximum does not depend on the number of times that it is taken, so passes that
    recompute activations may report it again. Takes part: every attention layer with an
    `observer`, `scale_scores` and `num_heads` (`k3_core.attention.mla`).
    """

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self.tau = config.optim.qk_clip_tau
        self.layers: list[Any] = []
        self._step_LH: list[Tensor] = []
        self._resumed: Mapping[str, Tensor] = {}

    def started(self, trainer: Trainer) -> None:
        """Observe the layers of the model from now on."""
        modules = trainer.state.model.modules()
        self.layers = [one for one in modules if hasattr(one, "scale_scores")]
        device = trainer.stepper.device
        self._step_LH = [_lowest(layer.num_heads, device) for layer in self.layers]
        self._row_LH = [largest_H.clone() for largest_H in self._step_LH]
        self.load_state_tensors(self._resumed)
        for layer, largest_H in zip(self.layers, self._step_LH, strict=True):
            layer.observer = _Maximum(largest_H)

    def stepped(self, trainer: Trainer, metrics: Mapping[str, Tensor]) -> None:
        """Clip; no value is read back from the device."""
        for layer, step_H, row_H in zip(self.layers, self._step_LH, self._row_LH, strict=True):
            layer.scale_scores(clip_factors(step_H, self.tau))
            torch.fmax(row_H, step_H, out=row_H)
        self.skipped(trainer)

    def skipped(self, trainer: Trainer) -> None:
        """Forget the step."""
        for step_H in self._step_LH:
            step_H.fill_(-math.inf)

    def row_values(self, trainer: Trainer) -> Mapping[str, float]:
        """`max_logit`, the largest score since the last row, and `clipped_heads`, those above tau.

        A model without such layers has neither.
        """
        if not self.layers:
            return {}
        row = torch.cat(self._row_LH)
        num_clipped = (clip_factors(row, self.tau) < 1).sum()
        largest, clipped = torch.stack((row.max(), num_clipped)).tolist()
        for row_H in self._row_LH:
            row_H.fill_(-math.inf)
        return {"max_logit": largest, "clipped_heads": clipped}

    def state_tensors(self) -> dict[str, Tensor]:
        """The largest scores of the step so far, for a checkpoint between micro-batches."""
        return {f"largest.{index}": step_H for index, step_H in enumerate(self._step_LH)}

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what `state_tensors` gave; until `started` knows the layers it is kept."""
        self._resumed = {} if self.layers else dict(tensors)
        for name, own_H in self.state_tensors().items():
            if name in tensors:
                own_H.copy_(tensors[name])


def clip_factors(largest_H: Tensor, tau: float) -> Tensor:
    """tau / S where S > tau, else 1; also 1 where a bad step left no finite score."""
    is_clipped_H = (largest_H > tau) & largest_H.isfinite()
    return torch.where(is_clipped_H, tau / largest_H, 1.0)


class _Maximum:
    """An observer that keeps the largest scores that it is told, in place."""

    def __init__(self, largest_H: Tensor) -> None:
        self.largest_H = largest_H

    def __call__(self, largest_H: Tensor) -> None:
        # Not `maximum`: a NaN would hide the scores of the other micro-batches.
        torch.fmax(self.largest_H, largest_H.to(self.largest_H.dtype), out=self.largest_H)


def _lowest(num_heads: int, device: torch.device) -> Tensor:
    return torch.full((num_heads,), -math.inf, device=device)
