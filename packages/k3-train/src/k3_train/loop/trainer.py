"""The trainer: steps until a target, with rows, checkpoints and a way to stop (report 5).

It owns no policy about time or folders' contents: `loop.session` plans the number of steps and
exports the model.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from k3_train.balance.load import LoadTracker
from k3_train.config import RunSection
from k3_train.data.sampler import Batch
from k3_train.loop import checkpoint
from k3_train.loop.log import Interval, LogRow, append_row, drop_rows_after
from k3_train.loop.prefetch import Prefetcher
from k3_train.loop.progress import Reporter
from k3_train.loop.state import TrainState
from k3_train.loop.step import Stepper
from k3_train.loop.stop import StopRequest


class Schedule(Protocol):
    """The target of an `Impl` of kind "schedule"."""

    def factor(self, step: int) -> float:
        """What multiplies every peak learning rate in update number `step`, from 0."""


class Sampler(Protocol):
    """Batches as a function of their index, so that the step is the data position."""

    def batch(self, step: int, micro: int = 0) -> Batch:
        """The micro-batch number `micro` of optimizer step `step`."""


class Trainer:
    """Runs steps and writes `run.jsonl` and `checkpoints/` below `folder`."""

    def __init__(
        self,
        stepper: Stepper,
        sampler: Sampler,
        loads: LoadTracker,
        *,
        run: RunSection,
        peak_lr: float,
        folder: Path,
    ) -> None:
        self.stepper, self.sampler, self.loads = stepper, sampler, loads
        self.state: TrainState = stepper.state
        self.events = self.state.events
        self.run_section, self.peak_lr, self.folder = run, peak_lr, folder
        self.rows_path = folder / "run.jsonl"
        self.checkpoints = folder / "checkpoints"

    def resume(self) -> None:
        """Continue from the newest checkpoint of the folder."""
        tensors, meta = checkpoint.load(checkpoint.newest(self.checkpoints))
        self.state.restore(tensors, meta["step"], meta["tokens"])
        drop_rows_after(self.rows_path, meta["step"])

    def run(self, until: int, schedule: Schedule, reporter: Reporter) -> str:
        """Train to step `until`, checkpoint at the end; the name of a signal that stopped it.

        Raises `NonFiniteLossError` at the next row or checkpoint after a bad step.
        """
        batches = Prefetcher(self._batches)
        self.state.model.train()
        try:
            with reporter, StopRequest() as stop:
                self.events.started(self)
                self._loop(until, schedule, batches, reporter, stop)
                self.events.finished(self, stop.name)
        finally:
            batches.close()
        return stop.name

    def _loop(
        self,
        until: int,
        schedule: Schedule,
        batches: Prefetcher,
        reporter: Reporter,
        stop: StopRequest,
    ) -> None:
        state, every = self.state, self.run_section
        interval = Interval(self.stepper.device)
        first_step, started = state.step, time.perf_counter()
        row_tokens, row_time = state.tokens, started
        while state.step < until and not stop.name:
            factor = schedule.factor(state.step)
            metrics, norm = self.stepper.step(
                batches.get(state.step), factor, lambda: self.events.gradients(self)
            )
            interval.add(state.step, metrics, norm)
            self.events.stepped(self, {**metrics, "grad_norm": norm})
            is_last = state.step == until or bool(stop.name)
            if state.step == 1 or state.step % every.log_every == 0 or is_last:
                row = self._row(interval, factor, state.tokens - row_tokens, row_time)
                now = time.perf_counter()
                pace = (now - started) / (state.step - first_step)
                reporter.row(row, pace * (until - state.step))
                row_tokens, row_time = state.tokens, now
            if state.step % every.checkpoint_every == 0 and not is_last:
                interval.check()
                self.save()
        interval.check()
        if state.step > first_step:
            path = self.save()
            reporter.note(f"saved {path}" + (f" on {stop.name}" if stop.name else ""))

    def _row(self, interval: Interval, factor: float, tokens: int, since: float) -> LogRow:
        interval.check()
        loss, norm, mtp_loss = interval.means()
        load = self.loads.summary()
        row = LogRow(
            step=self.state.step,
            tokens=self.state.tokens,
            loss=loss,
            lr=self.peak_lr * factor,
            tokens_per_s=tokens / (time.perf_counter() - since),
            grad_norm=norm,
            max_over_mean_load=load.max_over_mean,
            dead_experts=load.num_dead,
            mtp_loss=mtp_loss,
            values=self.events.row_values(self),
        )
        append_row(self.rows_path, row)
        self.events.row(self, row)
        return row

    def save(self) -> Path:
        """Write a checkpoint of the current step; returns its folder."""
        meta = {"tokens": self.state.tokens}
        keep = self.run_section.keep_checkpoints
        folder = checkpoint.save(
            self.checkpoints, self.state.step, self.state.tensors(), meta, keep
        )
        self.events.saved(self, folder)
        return folder

    def measure_step_seconds(self, num_steps: int, num_warmup: int = 0) -> float:
        """Mean seconds of a step, after a warm-up; the state is put back as it was."""
        before = self.state.snapshot()
        self.state.model.train()
        for index in range(num_warmup + num_steps):
            if index == num_warmup:
                start = self._now()
            self.stepper.step(self._batches(self.state.step), 0.0)
        seconds = (self._now() - start) / num_steps
        self.state.restore(*before)
        self.loads.summary()
        return seconds

    def _now(self) -> float:
        if self.stepper.device.type == "cuda":
            torch.cuda.synchronize(self.stepper.device)
        return time.perf_counter()

    def _batches(self, step: int) -> Sequence[Batch]:
        return [self.sampler.batch(step, micro) for micro in range(self.run_section.accumulation)]
