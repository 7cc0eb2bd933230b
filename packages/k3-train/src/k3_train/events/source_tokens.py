"""Per-source accounting: `run.events = ["source_tokens"]` adds tokens and epochs to the rows."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from k3_train.events.base import TrainerEvent

if TYPE_CHECKING:
    from k3_train.loop.trainer import Trainer


class SourceTokens(TrainerEvent):
    """`tokens_NAME` and `epochs_NAME` of each token file, from the start of the run."""

    def row_values(self, trainer: "Trainer") -> Mapping[str, float]:
        """What the steps so far have read: a function of the step alone."""
        sampler: Any = trainer.sampler
        read = sampler.source_tokens(trainer.state.step)
        tokens = {f"tokens_{name}": float(count) for name, (count, _) in read.items()}
        return tokens | {f"epochs_{name}": round(epochs, 6) for name, (_, epochs) in read.items()}
