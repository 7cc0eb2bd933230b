"""The trainer event `evaluate`: suites during the training, in evaluation.jsonl and in the rows.

Nothing of the run depends on it: the model is back in train mode, random generators are put back,
and balancers count training passes only.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from k3_core.tasks.base import check_effort
from k3_train.evaluate.base import Subject, Wanted
from k3_train.evaluate.digest import parameters_digest
from k3_train.evaluate.rows import Row, evaluate, open_suite
from k3_train.events.base import TrainerEvent
from k3_train.loop.corpus import open_tokenizer
from k3_train.loop.curriculum import Curriculum
from k3_train.loop.log import drop_rows_after
from k3_train.precision import training_precision

if TYPE_CHECKING:
    from k3_train.config import TrainConfig
    from k3_train.loop.trainer import Trainer

FILE = "evaluation.jsonl"
PLACES = ("length", "depth")
"""Conditions that tell figures of one family and metric apart."""


class Evaluate(TrainerEvent):
    """Runs `evaluate.suites` at every `evaluate.every`-th row."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        section = config.evaluate
        for effort in section.efforts:
            check_effort(effort)
        self._suites = {
            name: open_suite(name, section.options.get(name)) for name in section.suites
        }
        self._wanted = Wanted(section.seed, section.limit, section.efforts)
        self._every = config.run.log_every * section.every

    def started(self, trainer: Trainer) -> None:
        """Open the tokenizer, and drop rows of steps that a resumed run takes again."""
        model = trainer.state.model
        data = Path(self.config.data.path or trainer.folder / "data")
        self._subject = Subject(
            model,
            open_tokenizer(data, model.config.text.vocab_size),
            trainer.folder.resolve().name,
            "",
            Curriculum(self.config).grain,
        )
        self._path = trainer.folder / FILE
        drop_rows_after(self._path, trainer.state.step)

    def row_values(self, trainer: Trainer) -> Mapping[str, float]:
        """Every figure by `suite/family/metric`, with effort and length where it has them."""
        step = trainer.state.step
        if step % self._every:
            return {}
        subject = replace(self._subject, digest=parameters_digest(self._subject.model))
        values = {}
        with _aside(subject), self._path.open("a", encoding="utf-8") as file:
            for row in evaluate(subject, self._suites, self._wanted):
                file.write(row.line(step=step))
                values[key_of(row)] = row.value
        return values


def key_of(row: Row) -> str:
    """The name of a figure in a row of `run.jsonl`."""
    place = [
        f"{name}{row.conditions[name]:g}" for name in ("length", "depth") if name in row.conditions
    ]
    return "/".join([row.suite, row.family, *filter(None, [row.effort]), *place, row.metric])


@contextmanager
def _aside(subject: Subject) -> Iterator[None]:
    """Eval mode in the precision of training; random generators and the mode are put back."""
    model = subject.model
    devices = [model.device] if model.device.type == "cuda" else []
    kept, was_training = (random.getstate(), np.random.get_state()), model.training
    model.eval()
    try:
        with torch.random.fork_rng(devices), training_precision(model.device):
            yield
    finally:
        model.train(was_training)
        random.setstate(kept[0])
        np.random.set_state(kept[1])
