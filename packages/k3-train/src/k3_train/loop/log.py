"""Rows of `run.jsonl`, and the losses and norms that wait on the device for the next row."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from k3_core.errors import K3Error


class NonFiniteLossError(K3Error):
    """A loss or gradient norm became NaN or infinite."""


@dataclass(frozen=True)
class LogRow:
    """One row; the order of the keys is fixed.

    loss and grad_norm are means over the steps since the previous row; loss is the next-token
    loss in nats per token, mtp_loss (0 without MTP) that of the token after it; lr is Muon's
    rate; tokens counts from the start of the run; max_over_mean_load is the worst router's.
    values are what events add (`TrainerEvent.row_values`); a file has them beside the others.
    """

    step: int
    tokens: int
    loss: float
    lr: float
    tokens_per_s: float
    grad_norm: float
    max_over_mean_load: float
    dead_experts: int
    mtp_loss: float
    values: Mapping[str, float] = field(default_factory=dict)

    def flat(self) -> dict[str, float]:
        """All numbers by name, as a line of `run.jsonl` has them."""
        own = asdict(self)
        return own | own.pop("values")


class Interval:
    """Sums of the steps since the last row, on the device; remembers the first bad step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._bad_step = torch.tensor(-1, device=device)
        self._reset()

    def add(self, step: int, metrics: dict[str, Tensor], norm: Tensor) -> None:
        """Add one finished step."""
        self.num_steps += 1
        self._loss += metrics["loss"]
        self._norm += norm
        if "mtp_loss" in metrics:
            self._mtp += metrics["mtp_loss"]
        is_first_bad = ~torch.isfinite(metrics["loss"] + norm) & (self._bad_step < 0)
        self._bad_step = torch.where(is_first_bad, step, self._bad_step)

    def check(self) -> None:
        """Raise `NonFiniteLossError` with the first step whose loss or norm was not finite."""
        bad = int(self._bad_step)
        if bad >= 0:
            raise NonFiniteLossError(
                f"loss or gradient norm is not finite at step {bad}; nothing was saved after the "
                "last checkpoint: resume from it with a lower optim.muon_lr or optim.adamw_lr"
            )

    def means(self) -> tuple[float, float, float]:
        """Mean loss, gradient norm and MTP loss; starts a new interval."""
        sums = torch.stack([self._loss, self._norm, self._mtp]).tolist()
        loss, norm, mtp = (value / max(1, self.num_steps) for value in sums)
        self._reset()
        return loss, norm, mtp

    def _reset(self) -> None:
        self.num_steps = 0
        self._loss, self._norm, self._mtp = torch.zeros(3, device=self._device).unbind()


def append_row(path: Path, row: LogRow) -> None:
    """Append one line of JSON."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row.flat()) + "\n")


def drop_rows_after(path: Path, step: int) -> None:
    """Forget the rows of steps that a resumed run takes again."""
    if path.is_file():
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
        path.write_text("".join(kept), encoding="utf-8")
