"""The trainer event `clamped_glu`: the feed-forwards of a run use SwiGLU with clamped inputs.

The alternative to SiTU's smooth caps in the study of activations (report 4.1); the limit is that of
the gpt-oss models. It takes the place of `situ_glu` from outside the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import functional as F

from k3_core.config import ConfigError
from k3_core.ops import OpSet
from k3_train.events.base import TrainerEvent
from k3_train.report.probe import with_ops

if TYPE_CHECKING:
    from k3_train.loop.trainer import Trainer

LIMIT = 7.0


def clamped_glu(gate: Tensor, up: Tensor, *, beta: float, linear_beta: float | None) -> Tensor:
    """SiLU(min(gate, 7)) * clamp(up, -7, 7); the caps of SiTU are not used."""
    del beta, linear_beta
    return F.silu(gate.clamp(max=LIMIT)) * up.clamp(-LIMIT, LIMIT)


class ClampedGLU(TrainerEvent):
    """Replaces the activation when a run starts or is resumed."""

    def started(self, trainer: Trainer) -> None:
        """Give every module that calls `situ_glu` this activation in its place."""
        text = trainer.state.model.config.text
        if text.hidden_act != "situ":
            raise ConfigError(
                "run.events", f"clamped_glu with hidden_act {text.hidden_act!r}", "Use 'situ'."
            )
        for module in trainer.state.model.modules():
            # The feed-forwards are what keeps a configuration and ops of its own.
            held: dict[str, Any] = vars(module)
            if "config" in held and isinstance(held.get("ops"), OpSet):
                held["ops"] = with_ops(held["ops"], situ_glu=clamped_glu)
