"""Stages of a run: context length, batch, rate and mixture by step (report 4, training 7).

All stages read the same streams of tokens: each goes on where the one before ended, so no token
comes twice before its file was read once, whatever the lengths into which documents are cut. The
place of every stage follows from the settings, so that the step alone says where the data is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from k3_core.config import ConfigError
from k3_train.config import Stage, TrainConfig
from k3_train.data.sampler import Batch, PackedSampler

if TYPE_CHECKING:
    from k3_train.loop.trainer import Schedule


@dataclass(frozen=True)
class Span:
    """A stage with all of its values. num_steps is 0 for one that goes on to the end."""

    name: str
    first_step: int
    num_steps: int
    max_seq_len: int
    tokens_per_batch: int
    accumulation: int
    lr_scale: float
    weights: dict[str, float]


class Curriculum:
    """The stages of a configuration; one without any is a single stage without end.

    ConfigError names a stage that cannot be.
    """

    def __init__(self, config: TrainConfig) -> None:
        stages = config.curriculum or (Stage("all"),)
        spans: list[Span] = []
        for number, stage in enumerate(stages):
            is_last = number == len(stages) - 1
            first = spans[-1].first_step + spans[-1].num_steps if spans else 0
            spans.append(_span(stage, f"curriculum[{number}]", first, config, is_last=is_last))
        self.spans = tuple(spans)
        self._ends = [span.first_step + span.num_steps for span in spans[:-1]]
        self.grain = max(span.max_seq_len for span in spans)
        for number, span in enumerate(spans):
            if self.grain % span.max_seq_len:
                raise ConfigError(
                    f"curriculum[{number}].max_seq_len",
                    f"{span.max_seq_len} does not divide the longest of all, {self.grain}",
                    "Give lengths that divide it, such as 256, 1024 and 4096.",
                )

    @property
    def total_steps(self) -> int:
        """Steps of all stages; 0 when the last goes on to the end."""
        last = self.spans[-1]
        return last.first_step + last.num_steps if last.num_steps else 0

    def index(self, step: int) -> int:
        """Number of the stage of optimizer step `step` (both from 0); the last has no end."""
        return bisect_right(self._ends, step)

    def at(self, step: int) -> Span:
        """The stage of optimizer step `step`."""
        return self.spans[self.index(step)]

    def num_micro(self, step: int) -> int:
        """Micro-batches of optimizer step `step`."""
        return self.at(step).accumulation


class CurriculumSampler:
    """Batches of every stage as a function of the step; `samplers` has one a stage."""

    def __init__(self, curriculum: Curriculum, samplers: Sequence[PackedSampler]) -> None:
        self.curriculum, self.samplers = curriculum, list(samplers)

    def batch(self, step: int, micro: int = 0) -> Batch:
        """The micro-batch number `micro` of optimizer step `step`."""
        sampler, own_step = self._at(step)
        return sampler.batch(own_step, micro)

    @property
    def has_images(self) -> bool:
        """Whether batches of some stage have pictures."""
        return any(sampler.has_images for sampler in self.samplers)

    def position(self, step: int) -> dict[str, object]:
        """Where `step` begins in the streams, as `PackedSampler.position`."""
        sampler, own_step = self._at(step)
        return sampler.position(own_step)

    def source_tokens(self, step: int) -> dict[str, tuple[int, float]]:
        """Tokens and epochs read before `step`, as `PackedSampler.source_tokens`."""
        sampler, own_step = self._at(step)
        return sampler.source_tokens(own_step)

    def _at(self, step: int) -> tuple[PackedSampler, int]:
        index = self.curriculum.index(step)
        return self.samplers[index], step - self.curriculum.spans[index].first_step


class StagedSchedule:
    """A schedule whose rate every stage scales."""

    def __init__(self, schedule: Schedule, curriculum: Curriculum) -> None:
        self.schedule, self.curriculum = schedule, curriculum

    def factor(self, step: int) -> float:
        """The factor of the schedule times that of the stage."""
        return self.schedule.factor(step) * self.curriculum.at(step).lr_scale


def _span(stage: Stage, path: str, first: int, config: TrainConfig, *, is_last: bool) -> Span:
    numbers = ("steps", "tokens", "max_seq_len", "tokens_per_batch", "accumulation", "lr_scale")
    if wrong := [name for name in numbers if getattr(stage, name) < 0]:
        raise ConfigError(f"{path}.{wrong[0]}", "is negative", "Give 0 for the run's value.")
    if stage.steps and stage.tokens:
        raise ConfigError(path, f"stage {stage.name!r} has steps and tokens", "Give one of them.")
    if not (stage.steps or stage.tokens or is_last):
        raise ConfigError(
            path, f"stage {stage.name!r} has no length", "Give steps or tokens; the last may not."
        )
    tokens_per_batch = stage.tokens_per_batch or config.data.tokens_per_batch
    accumulation = stage.accumulation or config.run.accumulation
    return Span(
        stage.name,
        first,
        stage.steps or -(-stage.tokens // (tokens_per_batch * accumulation)),
        stage.max_seq_len or config.data.max_seq_len,
        tokens_per_batch,
        accumulation,
        stage.lr_scale,
        stage.weights or config.data.weights,
    )
