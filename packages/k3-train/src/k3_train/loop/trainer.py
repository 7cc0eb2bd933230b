"""The trainer: steps until a target, with rows, checkpoints and a way to stop (report 5).

It owns no policy about time or folders' contents: `loop.session` plans the number of steps and
exports the model.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from k3_train.balance.load import LoadTracker
from k3_train.config import RunSection
from k3_train.data.sampler import Batch
from k3_train.loop import checkpoint
from k3_train.loop.log import Interval, LogRow, append_row, drop_rows_after
from k3_train.loop.prefetch import Prefetcher
from k3_train.loop.progress import Reporter
from k3_train.loop.saver import CheckpointSaver
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
    """Runs steps and writes `run.jsonl` and `checkpoints/` below `folder`.

    num_micro: micro-batches of a step, by its number. mfu_per_token: the share of the device's
    peak that a token a second is; 0 where the peak is not known.
    """

    def __init__(
        self,
        stepper: Stepper,
        sampler: Sampler,
        loads: LoadTracker,
        *,
        run: RunSection,
        peak_lr: float,
        folder: Path,
        num_micro: Callable[[int], int],
        mfu_per_token: float = 0.0,
    ) -> None:
        self.stepper, self.sampler, self.loads = stepper, sampler, loads
        self.state: TrainState = stepper.state
        self.events = self.state.events
        self.run_section, self.peak_lr, self.folder = run, peak_lr, folder
        self.num_micro, self.mfu_per_token = num_micro, mfu_per_token
        self.rows_path = folder / "run.jsonl"
        self.checkpoints = folder / "checkpoints"
        self._saver = CheckpointSaver(self.checkpoints, run.keep_checkpoints, stepper.device)
        self._reporter: Reporter | None = None

    def resume(self) -> None:
        """Continue from the newest checkpoint of the folder."""
        tensors, meta = checkpoint.load(checkpoint.newest(self.checkpoints))
        have, want = self._data_position(meta["step"]), meta.get("data")
        if have and want and have != want:
            raise checkpoint.CheckpointError(
                f"the data of step {meta['step']} would begin at {have}, the checkpoint was at "
                f"{want}: seed, weights, lengths or files were changed; put them back, or change "
                "them from here on with another [[curriculum]] stage"
            )
        self.state.restore(tensors, meta)
        drop_rows_after(self.rows_path, meta["step"])

    def run(self, until: int, schedule: Schedule, reporter: Reporter) -> str:
        """Train to step `until`, checkpoint at the end; the name of a signal that stopped it.

        Raises `NonFiniteLossError` (of the guard, or at the next row or checkpoint after a bad
        step) and `CheckpointError` when the last checkpoint cannot be written.
        """
        batches = Prefetcher(self._batches)
        self.state.model.train()
        self._reporter = reporter
        try:
            with reporter, StopRequest() as stop:
                self.events.started(self)
                self._loop(until, schedule, batches, reporter, stop)
                self.events.finished(self, stop.name)
        finally:
            self._reporter = None
            batches.close()
            self._saver.close()
        return stop.name

    def note(self, text: str) -> None:
        """Say something that is not a row to whoever watches the run."""
        if self._reporter is not None:
            self._reporter.note(text)

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
            self._step(batches.get(state.step), factor, interval)
            is_last = state.step == until or bool(stop.name)
            is_due = state.step == 1 or state.step % every.log_every == 0 or is_last
            if is_due and interval.num_steps:
                row = self._row(interval, factor, state.tokens - row_tokens, row_time)
                now = time.perf_counter()
                pace = (now - started) / (state.step - first_step)
                reporter.row(row, pace * (until - state.step))
                row_tokens, row_time = state.tokens, now
            self._collect_save()
            if state.step % every.checkpoint_every == 0 and not is_last:
                interval.check()
                self._start_save()
        interval.check()
        self._collect_save(wait=True)
        if state.step > first_step:
            path = self.save()
            reporter.note(f"saved {path}" + (f" on {stop.name}" if stop.name else ""))

    def _step(self, batches: Sequence[Batch], factor: float, interval: Interval) -> None:
        is_made = True

        def accepts(metrics: Mapping[str, Tensor]) -> bool:
            nonlocal is_made
            is_made = self.events.accepts(self, metrics)
            return is_made

        metrics, norm = self.stepper.step(
            batches, factor, lambda: self.events.gradients(self), accepts
        )
        if is_made:
            interval.add(self.state.step, metrics, norm)
            self.events.stepped(self, {**metrics, "grad_norm": norm})
        else:
            self.events.skipped(self)

    def _row(self, interval: Interval, factor: float, tokens: int, since: float) -> LogRow:
        interval.check()
        loss, norm, mtp_loss = interval.means()
        load = self.loads.summary()
        tokens_per_s = tokens / (time.perf_counter() - since)
        mfu = {"mfu": tokens_per_s * self.mfu_per_token} if self.mfu_per_token else {}
        row = LogRow(
            step=self.state.step,
            tokens=self.state.tokens,
            loss=loss,
            lr=self.peak_lr * factor,
            tokens_per_s=tokens_per_s,
            grad_norm=norm,
            max_over_mean_load=load.max_over_mean,
            dead_experts=load.num_dead,
            mtp_loss=mtp_loss,
            values={**mfu, **self.events.row_values(self)},
        )
        append_row(self.rows_path, row)
        self.events.row(self, row)
        return row

    def save(self) -> Path:
        """Write a checkpoint of the current step and wait for it; returns its folder."""
        self._start_save()
        folder = self._saver.collect(wait=True)
        assert folder is not None
        self.events.saved(self, folder)
        return folder

    def _start_save(self) -> None:
        self._collect_save(wait=True)
        meta = {**self.state.meta, "data": self._data_position(self.state.step)}
        self._saver.start(self.state.step, self.state.tensors(), meta)

    def _collect_save(self, *, wait: bool = False) -> None:
        """Tell of a save that is complete; one that failed is tried again at the next step due."""
        try:
            folder = self._saver.collect(wait=wait)
        except checkpoint.CheckpointError as error:
            self.note(f"{error} (training goes on)")
            return
        if folder is not None:
            self.events.saved(self, folder)

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

    def _data_position(self, step: int) -> dict[str, object]:
        """Where the sampler is at the beginning of a step; empty when it cannot say."""
        position = getattr(self.sampler, "position", None)
        return position(step) if position is not None else {}

    def _batches(self, step: int) -> Sequence[Batch]:
        return [self.sampler.batch(step, micro) for micro in range(self.num_micro(step))]
