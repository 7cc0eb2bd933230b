"""Says when a stage of the curriculum begins and puts its number into the rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from k3_train.events.base import TrainerEvent
from k3_train.loop.curriculum import Curriculum

if TYPE_CHECKING:
    from k3_train.config import TrainConfig
    from k3_train.loop.trainer import Trainer


class Stages(TrainerEvent):
    """The row value `stage` counts from 1."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self.curriculum = Curriculum(config)
        self._told = -1

    def started(self, trainer: Trainer) -> None:
        """Name the stage that the run is in."""
        self._tell(trainer)

    def stepped(self, trainer: Trainer, metrics: Mapping[str, Tensor]) -> None:
        """Name the next stage when this was the last step of one."""
        self._tell(trainer)

    def row_values(self, trainer: Trainer) -> Mapping[str, float]:
        """The stage of the step that was just made."""
        return {"stage": self.curriculum.index(max(0, trainer.state.step - 1)) + 1}

    def _tell(self, trainer: Trainer) -> None:
        index = self.curriculum.index(trainer.state.step)
        if index != self._told:
            self._told, span = index, self.curriculum.spans[index]
            trainer.note(
                f"stage {index + 1} of {len(self.curriculum.spans)}, {span.name}: pieces of up to "
                f"{span.max_seq_len} tokens, {span.accumulation} x {span.tokens_per_batch} a step"
            )
