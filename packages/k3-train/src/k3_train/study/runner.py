"""Runs what a plan asks for, several processes at a time, and keeps every finished row at once."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3_train.report.run_page import read_lines
from k3_train.study.data import build_data
from k3_train.study.declare import Arm, Study
from k3_train.study.plan import Plan
from k3_train.study.run import run_job
from k3_train.study.settings import Job, check_arm

RESULTS = "results.jsonl"
MARGIN = 1.15
"""How much longer than the slowest of the newest runs a run may take: what still fits."""
NEWEST = 8


@dataclass(frozen=True)
class Outcome:
    """How a sitting ended: runs that it added, runs that it found, whether nothing is left."""

    num_added: int
    num_found: int
    is_done: bool


class Runner:
    """One sitting of a study at one scale. Folders are made as needed.

    out: folder of the study's results. work: of its corpus and of runs while they go on.
    """

    def __init__(
        self, study: Study, scale_name: str, arms: list[Arm], *, out: Path, work: Path
    ) -> None:
        self.study = study
        self.scale = study.scale(scale_name)
        self.out, self.work = out, work
        self.arms = {arm.name: arm for arm in arms}
        for arm in arms:
            check_arm(arm, self.scale)
        self.rows = [row for row in read_lines(out / RESULTS) if row["scale"] == scale_name]
        self.plan = Plan(arms, self.scale, self.rows)

    def run(self, *, deadline: float, workers: int, say: Callable[[str], None] = print) -> Outcome:
        """Run until all is done or nothing more fits before `deadline` (`time.monotonic`).

        A run that is not finished by the deadline is given up.
        """
        self.out.mkdir(parents=True, exist_ok=True)
        num_found = self._num_done()
        build_data(self.work / "data", self.scale)
        running: dict[Future[dict], Job] = {}
        num_added = 0
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(workers, mp_context=context) as pool:
            while True:
                self._begin(pool, running, workers, deadline)
                if not running:
                    break
                left = max(0.0, deadline - time.monotonic())
                done, _ = wait(running, timeout=left, return_when=FIRST_COMPLETED)
                if not done:
                    self._give_up(pool, running, say)
                    break
                for future in done:
                    del running[future]
                    num_added += 1
                    say(self._keep(future.result()))
        return Outcome(num_added, num_found, self.plan.is_done())

    def _begin(
        self,
        pool: ProcessPoolExecutor,
        running: dict[Future[dict], Job],
        workers: int,
        deadline: float,
    ) -> None:
        while len(running) < workers:
            job = self.plan.next(running.values())
            if job is None or not self._fits(job, deadline):
                return
            arm = self.arms[job.arm]
            args = (self.study.name, arm, self.scale, job, self.work)
            running[pool.submit(run_job, *args)] = job

    def _fits(self, job: Job, deadline: float) -> bool:
        return time.monotonic() + MARGIN * self._pace(job.phase) * job.tokens < deadline

    def _pace(self, phase: str) -> float:
        """Seconds a token of the slowest of the newest runs of a phase.

        Before any, those of the fastest short run, whose start weighs more; zero before that.
        """
        paces = [row["seconds"] / row["tokens"] for row in self.rows if row["phase"] == phase]
        if paces:
            return max(paces[-NEWEST:])
        return min((row["seconds"] / row["tokens"] for row in self.rows), default=0.0)

    def _keep(self, row: dict[str, Any]) -> str:
        with (self.out / RESULTS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, separators=(",", ":")) + "\n")
        self.plan.add(row)
        self.rows.append(row)
        result = f"loss {row['loss']:.4f}" if row.get("loss") is not None else row["status"]
        return (
            f"{row['arm']}  {row['phase']}  rate x{row['rate']:g}  seed {row['seed']}  {result}  "
            f"{row['seconds']:.0f} s"
        )

    def _give_up(
        self,
        pool: ProcessPoolExecutor,
        running: dict[Future[dict], Job],
        say: Callable[[str], None],
    ) -> None:
        for job in running.values():
            say(f"{job.arm}  {job.phase}  seed {job.seed}  given up: the budget is spent")
        for process in multiprocessing.active_children():
            process.kill()  # they would take SIGTERM as a wish to stop after the step
        pool.shutdown(wait=False, cancel_futures=True)

    def _num_done(self) -> int:
        jobs = [job for a in self.plan.arms for job in (*self.plan.search(a), *self.plan.full(a))]
        return sum(self.plan.row(job) is not None for job in jobs)
