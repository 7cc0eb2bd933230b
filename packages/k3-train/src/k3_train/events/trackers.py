"""The loggers `trackio` and `wandb`: libraries with one interface, imported when a run names them.

Whatever they do with a network is theirs: both have an offline mode by their own variables.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from k3_train.events.base import TrainerEvent
from k3_train.optional import require

if TYPE_CHECKING:
    from k3_train.config import TrainConfig
    from k3_train.loop.log import LogRow
    from k3_train.loop.trainer import Trainer


class Tracker(TrainerEvent):
    """Begins a run of the library with the settings, sends it every row, ends it."""

    module = ""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self.library = require(self.module, self.module, "run.loggers")

    def started(self, trainer: Trainer) -> None:
        """Begin, or go on with, the run that has the name of this one."""
        name = self.config.log.name or trainer.folder.resolve().name
        self.library.init(
            project=self.config.log.project,
            name=name,
            config=asdict(self.config),
            resume="allow",
            **self.identity(name),
        )

    def identity(self, name: str) -> dict[str, str]:
        """What else the library needs to know a run again by."""
        return {}

    def row(self, trainer: Trainer, row: LogRow) -> None:
        """Send the numbers of a row."""
        values = row.flat()
        self.library.log(values, step=int(values.pop("step")))

    def finished(self, trainer: Trainer, stopped: str) -> None:
        """End the run."""
        self.library.finish()


class Trackio(Tracker):
    """trackio: a local data base and dashboard."""

    module = "trackio"


class Wandb(Tracker):
    """Weights & Biases."""

    module = "wandb"

    def identity(self, name: str) -> dict[str, str]:
        """It knows runs by their id, names may be those of several."""
        return {"id": "".join(one if one.isalnum() or one in "-_" else "-" for one in name)}
