"""What is left to run of a study, from the rows that there are: no state besides them.

The learning rate of each arm is searched on short runs of seed 0; full runs follow seed by seed, so
that a study that is cut short has every arm once before any arm twice.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from k3_train.study.declare import Arm, Scale
from k3_train.study.settings import Job, job_of

Row = Mapping[str, Any]


class Plan:
    """The runs of some arms at one scale, and which of them are in `rows`."""

    def __init__(self, arms: Sequence[Arm], scale: Scale, rows: Sequence[Row]) -> None:
        self.arms, self.scale = list(arms), scale
        self._found: dict[tuple, Row] = {}
        for row in rows:
            self.add(row)

    def add(self, row: Row) -> None:
        """Count a finished run."""
        self._found[row["arm"], row["phase"], row["rate"], row["seed"], row["digest"]] = row

    def row(self, job: Job) -> Row | None:
        """The row of a run that is done."""
        return self._found.get(job.key)

    def search(self, arm: Arm) -> list[Job]:
        """The short runs of an arm; none where there is one rate only."""
        rates = arm.rates or self.scale.rates
        return [job_of(arm, self.scale, "search", r, 0) for r in rates] if len(rates) > 1 else []

    def rate(self, arm: Arm) -> float | None:
        """The rate of the arm's full runs; None as long as its search is not complete.

        That of the least held-out loss; the smallest one where every short run stopped.
        """
        jobs = self.search(arm)
        if not jobs:
            return (arm.rates or self.scale.rates)[0]
        rows = [self.row(job) for job in jobs]
        losses = {row["rate"]: loss_of(row) for row in rows if row is not None}
        if len(losses) < len(jobs):
            return None
        return min(losses, key=lambda rate: (losses[rate], rate))

    def full(self, arm: Arm) -> list[Job]:
        """The full runs of an arm, a seed each; none as long as its rate is not known."""
        rate = self.rate(arm)
        if rate is None:
            return []
        return [job_of(arm, self.scale, "full", rate, seed) for seed in range(self.scale.seeds)]

    def runnable(self) -> Iterator[Job]:
        """Runs that can begin now and are not done, the most wanted first."""
        for arm in self.arms:
            yield from (job for job in self.search(arm) if self.row(job) is None)
        for seed in range(self.scale.seeds):
            for arm in self.arms:
                jobs = self.full(arm)
                if jobs and self.row(jobs[seed]) is None:
                    yield jobs[seed]

    def next(self, running: Collection[Job]) -> Job | None:
        """The most wanted run that is not under way; None when nothing can begin."""
        return next((job for job in self.runnable() if job not in running), None)

    def is_done(self) -> bool:
        """Whether every arm has all of its full runs."""
        return all(self.full(arm) for arm in self.arms) and next(self.runnable(), None) is None


def loss_of(row: Row) -> float:
    """Held-out loss of a run, infinite where it stopped."""
    loss = row.get("loss")
    return math.inf if loss is None else float(loss)
