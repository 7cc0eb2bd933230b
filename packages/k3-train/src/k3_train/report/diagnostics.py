"""The trainer event `diagnostics`: snapshots of what the loss does not show, in diagnostics.jsonl.

L routers, E experts, H heads. A snapshot is taken at step 1, at every `diagnostics.every`-th row
of `run.jsonl`, and at the end of the run; the last one may lack what belongs to a step.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from k3_train.events.base import TrainerEvent
from k3_train.loop.log import drop_rows_after
from k3_train.optim.roles import Role, assign_roles
from k3_train.report.probe import probe

if TYPE_CHECKING:
    from k3_train.config import TrainConfig
    from k3_train.loop.log import LogRow
    from k3_train.loop.trainer import Trainer

FILE = "diagnostics.jsonl"
PROBE_STEP = 2**31
"""Step whose batch is the probe: of the distribution of the run, at a position it never reaches."""
_LAYER = re.compile(r"layers\.(\d+)\.")


class Diagnostics(TrainerEvent):
    """Expert loads and biases, AttnRes weights, KDA decays and states, update norms by head."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self._every = config.run.log_every * config.diagnostics.every
        self._before: dict[str, Tensor] = {}
        self._of_step: dict[str, Any] = {}
        self._written = 0

    def started(self, trainer: Trainer) -> None:
        """Draw the probe, and drop snapshots of steps that a resumed run takes again."""
        self._batch = trainer.sampler.batch(PROBE_STEP).head(self.config.diagnostics.tokens)
        model = trainer.state.model
        shapes = ((name, tuple(param.shape)) for name, param in model.named_parameters())
        roles = assign_roles(shapes, model.config.text)
        self._heads = {name: role for name, role in roles.items() if is_by_head(role)}
        routers = (name for name, _ in model.named_parameters() if "e_score_correction" in name)
        self._routers = [int(match[1]) for name in routers if (match := _LAYER.search(name))]
        self._path = trainer.folder / FILE
        drop_rows_after(self._path, trainer.state.step)

    def gradients(self, trainer: Trainer) -> None:
        """Keep the matrices by head of a step that gets a snapshot, as they are before it."""
        if self._is_due(trainer.state.step + 1):
            params = dict(trainer.state.model.named_parameters())
            self._before = {name: params[name].detach().clone() for name in self._heads}

    def stepped(self, trainer: Trainer, metrics: Mapping[str, Tensor]) -> None:
        """Take what a row would reset: loads, and the change of the kept matrices."""
        if not self._is_due(trainer.state.step):
            return
        params = dict(trainer.state.model.named_parameters())
        self._of_step = {
            "counts_LE": trainer.loads.counts_LE.clone(),
            "update_norm": {
                name: head_norms(self._heads[name], params[name].detach() - before)
                for name, before in self._before.items()
            },
        }
        self._before = {}

    def skipped(self, trainer: Trainer) -> None:
        """Forget what a step that is not made would have changed."""
        self._before = {}

    def row(self, trainer: Trainer, row: LogRow) -> None:
        """Write the snapshot of a step that is due."""
        if self._of_step:
            self._write(trainer)

    def finished(self, trainer: Trainer, stopped: str) -> None:
        """Write the last state, unless its step has a snapshot."""
        if trainer.state.step > self._written:
            self._write(trainer)

    def _is_due(self, step: int) -> bool:
        return step == 1 or step % self._every == 0

    def _write(self, trainer: Trainer) -> None:
        model, step = trainer.state.model, trainer.state.step
        seen = probe(model, self._batch)
        row: dict[str, Any] = {"step": step, "tokens": trainer.state.tokens}
        biases = [p for name, p in model.named_parameters() if "e_score_correction" in name]
        row |= {"routers": self._routers, "bias": [rounded(bias_E) for bias_E in biases]}
        if self._of_step:
            counts_LE = self._of_step["counts_LE"].double()
            mean_L1 = counts_LE.mean(-1, keepdim=True).clamp(min=1e-9)
            row["load"] = rounded(counts_LE / mean_L1)
            row["update_norm"] = _rounded_values(self._of_step["update_norm"])
        row |= {name: _rounded_values(value) for name, value in vars(seen).items()}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, separators=(",", ":")) + "\n")
        self._of_step, self._written = {}, step


def is_by_head(role: Role) -> bool:
    """Whether the role's blocks are heads."""
    return role.name in ("kda_qkv", "mla_q", "mla_kv")


def head_norms(role: Role, change: Tensor) -> Tensor:
    """Frobenius norm [H] of each head's part of a parameter's change."""
    squares = [piece.square().sum((1, 2)) for piece in role.split(change)]
    return torch.stack(squares).sum(0).sqrt()


def rounded(tensor: Tensor) -> Any:
    """Nested lists with three significant digits."""
    return _three_digits(tensor.tolist())


def _three_digits(value: Any) -> Any:
    if isinstance(value, list):
        return [_three_digits(one) for one in value]
    return float(f"{value:.3g}")


def _rounded_values(values: Mapping[Any, Tensor]) -> dict[str, Any]:
    return {str(key): rounded(tensor) for key, tensor in values.items()}
