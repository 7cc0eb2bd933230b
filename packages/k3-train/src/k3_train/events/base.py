"""The points of a run at which plugins act: loggers, guards, diagnostics, clipping by head.

An event sees the trainer and may keep state of its own, which travels in the checkpoint. It must
not wait for a GPU except in `row`, `saved` and `finished`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from k3_train.named_tensors import join, part_of

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from k3_train.config import TrainConfig
    from k3_train.loop.log import LogRow
    from k3_train.loop.trainer import Trainer


class TrainerEvent:
    """Base of all events; every method does nothing until it is overridden.

    The target of an `Impl` of kind "trainer_event" or "logger" is a class that is built as
    `target(config)` with the settings of the run.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.config = config

    def started(self, trainer: Trainer) -> None:
        """Before the first step of this process; the state is that of the resumed checkpoint."""

    def gradients(self, trainer: Trainer) -> None:
        """All micro-batches of a step went backward; `p.grad` holds their sum, unclipped."""

    def accepts(self, trainer: Trainer, metrics: Mapping[str, Tensor]) -> bool:
        """Whether the update may be made; asked after `gradients`, with what `stepped` gets.

        When one says no, the step is skipped: its batches count as read, all else stays as it was.
        """
        return True

    def skipped(self, trainer: Trainer) -> None:
        """A step was skipped instead of made: forget what was observed of it."""

    def stepped(self, trainer: Trainer, metrics: Mapping[str, Tensor]) -> None:
        """A step is done: parameters and biases are new, `trainer.state.step` counts it.

        metrics: `loss`, `mtp_loss`, `grad_norm` and what the model added, on the device.
        """

    def row_values(self, trainer: Trainer) -> Mapping[str, float]:
        """Values that the next row of `run.jsonl` takes in, by name; they are since the last."""
        return {}

    def row(self, trainer: Trainer, row: LogRow) -> None:
        """A row was written."""

    def saved(self, trainer: Trainer, folder: Path) -> None:
        """A checkpoint is complete in `folder`."""

    def finished(self, trainer: Trainer, stopped: str) -> None:
        """The run ends; `stopped` names the signal that ended it early, or is empty."""

    def state_tensors(self) -> dict[str, Tensor]:
        """What an exact resume needs of this event."""
        return {}

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what `state_tensors` gave."""


class Events(TrainerEvent):
    """Several events in a fixed order, as one."""

    def __init__(self, events: Mapping[str, TrainerEvent]) -> None:
        self.by_name = dict(events)

    def _all(self) -> Iterable[TrainerEvent]:
        return self.by_name.values()

    def started(self, trainer: Trainer) -> None:
        """Tell each."""
        for event in self._all():
            event.started(trainer)

    def gradients(self, trainer: Trainer) -> None:
        """Tell each."""
        for event in self._all():
            event.gradients(trainer)

    def accepts(self, trainer: Trainer, metrics: Mapping[str, Tensor]) -> bool:
        """Ask each in turn until one says no."""
        return all(event.accepts(trainer, metrics) for event in self._all())

    def skipped(self, trainer: Trainer) -> None:
        """Tell each."""
        for event in self._all():
            event.skipped(trainer)

    def stepped(self, trainer: Trainer, metrics: Mapping[str, Tensor]) -> None:
        """Tell each."""
        for event in self._all():
            event.stepped(trainer, metrics)

    def row_values(self, trainer: Trainer) -> Mapping[str, float]:
        """The values of all."""
        return {
            key: value for event in self._all() for key, value in event.row_values(trainer).items()
        }

    def row(self, trainer: Trainer, row: LogRow) -> None:
        """Tell each."""
        for event in self._all():
            event.row(trainer, row)

    def saved(self, trainer: Trainer, folder: Path) -> None:
        """Tell each."""
        for event in self._all():
            event.saved(trainer, folder)

    def finished(self, trainer: Trainer, stopped: str) -> None:
        """Tell each."""
        for event in self._all():
            event.finished(trainer, stopped)

    def state_tensors(self) -> dict[str, Tensor]:
        """The state of each, prefixed by its name."""
        return join({name: event.state_tensors() for name, event in self.by_name.items()})

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Hand each its own tensors; an event that the checkpoint does not know starts fresh."""
        for name, event in self.by_name.items():
            if own := part_of(tensors, name):
                event.load_state_tensors(own)
