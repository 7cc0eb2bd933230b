"""The logger `tensorboard`: every number of a row as a curve in RUN/tensorboard."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from k3_train.events.base import TrainerEvent
from k3_train.optional import require

if TYPE_CHECKING:
    from k3_train.config import TrainConfig
    from k3_train.loop.log import LogRow
    from k3_train.loop.trainer import Trainer

FOLDER = "tensorboard"


class TensorBoard(TrainerEvent):
    """Writes event files; what a resumed run takes again, the viewer drops."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        require("tensorboard", "tensorboard", "run.loggers")
        self._writer: Any = None

    def started(self, trainer: Trainer) -> None:
        """Open a file."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(
            str(trainer.folder / FOLDER), purge_step=trainer.state.step + 1
        )

    def row(self, trainer: Trainer, row: LogRow) -> None:
        """Add a point to each curve."""
        for name, value in row.flat().items():
            if name != "step":
                self._writer.add_scalar(f"train/{name}", value, row.step)
        self._writer.flush()

    def finished(self, trainer: Trainer, stopped: str) -> None:
        """Close the file."""
        self._writer.close()
