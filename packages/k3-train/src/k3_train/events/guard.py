"""The guard: a bad step is named before its update is made, and noted, skipped or stopped.

Bad is a loss or gradient norm that is not finite, or one far above its moving mean (a spike). What
the moving means and the counts are travels in the checkpoint (training 5, row 29). Both numbers
are of the whole step, so that many devices would decide alike. It waits for the device once a step.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from k3_core.errors import K3Error
from k3_train.events.base import TrainerEvent
from k3_train.events.trace import Finding, find_largest, find_non_finite
from k3_train.loop.log import NonFiniteLossError

if TYPE_CHECKING:
    from k3_train.config import TrainConfig
    from k3_train.loop.trainer import Trainer

FILE = "guard.jsonl"
_STATE = ("loss", "grad_norm", "num_seen", "num_skipped", "num_in_a_row")
_ADVICE = {
    "nonfinite": "set guard.nonfinite = 'skip' to leave such steps out",
    "spike": "set guard.spike = 'skip' to leave such steps out, or 'note'",
}


class SpikeError(K3Error):
    """A loss or gradient norm far above its moving mean stopped the run."""


class Guard(TrainerEvent):
    """Judges every step by the settings of `[guard]`; `guard.jsonl` has a line for each bad one."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self.settings = config.guard
        self.numbers = dict.fromkeys(_STATE, 0.0)
        """Moving means of loss and gradient norm, steps judged good, steps skipped in all, and
        in a row until now."""

    def accepts(self, trainer: Trainer, metrics: Mapping[str, Tensor]) -> bool:
        """Judge the step whose gradients are there."""
        loss, norm = torch.stack([metrics["loss"], metrics["grad_norm"]]).double().tolist()
        kind, what = self._judge({"loss": loss, "grad_norm": norm})
        if not kind:
            self._learn({"loss": loss, "grad_norm": norm})
            return True
        action = self.settings.nonfinite if kind == "nonfinite" else self.settings.spike
        find = find_non_finite if kind == "nonfinite" else find_largest
        finding = find(trainer)
        step = trainer.state.step + 1
        text = f"{what} at step {step}: {finding.text}"
        is_skipped = action == "skip"
        if is_skipped:
            self.numbers["num_skipped"] += 1
            self.numbers["num_in_a_row"] += 1
            if self.numbers["num_in_a_row"] > self.settings.max_skips:
                action, text = "stop", f"{text}; more than {self.settings.max_skips} in a row"
        self._write(trainer, step, kind, action, what, finding)
        if action == "stop":
            raise self._error(kind, text)
        trainer.note(f"{text} ({'skipped' if is_skipped else 'kept'})")
        return not is_skipped

    def row_values(self, trainer: Trainer) -> Mapping[str, float]:
        """The steps skipped since the run began, once there is one."""
        skipped = self.numbers["num_skipped"]
        return {"skipped_steps": int(skipped)} if skipped else {}

    def state_tensors(self) -> dict[str, Tensor]:
        """The moving means and counts."""
        return {"numbers": torch.tensor(list(self.numbers.values()), dtype=torch.float64)}

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what `state_tensors` gave."""
        self.numbers = dict(zip(_STATE, tensors["numbers"].tolist(), strict=True))

    def _judge(self, values: Mapping[str, float]) -> tuple[str, str]:
        """What kind of bad step it is and why in words; twice empty for a good one."""
        settings = self.settings
        bad = [name for name, value in values.items() if not math.isfinite(value)]
        if bad:
            is_off = settings.nonfinite == "off"
            return ("", "") if is_off else ("nonfinite", f"{' and '.join(bad)} not finite")
        if settings.spike != "off" and self.numbers["num_seen"] >= settings.warmup_steps:
            for name, value in values.items():
                mean = self._mean(name)
                if value > settings.spike_factor * mean > 0:
                    return "spike", f"{name} {value:.4g}, {value / mean:.1f} times its moving mean"
        return "", ""

    def _learn(self, values: Mapping[str, float]) -> None:
        ema = self.settings.ema
        if all(math.isfinite(value) for value in values.values()):
            for name, value in values.items():
                self.numbers[name] = ema * self.numbers[name] + (1 - ema) * value
            self.numbers["num_seen"] += 1
            self.numbers["num_in_a_row"] = 0

    def _mean(self, name: str) -> float:
        """The moving mean; it began at 0, which is divided out."""
        weight = 1 - self.settings.ema ** self.numbers["num_seen"]
        return self.numbers[name] / weight if weight else 0.0

    def _error(self, kind: str, text: str) -> K3Error:
        where = "nothing was saved after the last checkpoint: resume from it with a lower rate, or"
        error = NonFiniteLossError if kind == "nonfinite" else SpikeError
        return error(f"{text}; {where} {_ADVICE[kind]}")

    def _write(
        self, trainer: Trainer, step: int, kind: str, action: str, what: str, finding: Finding
    ) -> None:
        line = {"step": step, "kind": kind, "action": action, "what": what, **asdict(finding)}
        with (trainer.folder / FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
