"""The interface of an optimizer of the trainer, and one made of several parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from k3_train.named_tensors import join, part_of

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter

    from k3_core.config import TextConfig
    from k3_train.config import OptimConfig


class Optimizer(Protocol):
    """What the loop needs. All state is in `state_tensors`, by parameter name."""

    def step(self, lr_factor: float) -> None:
        """One update; every peak learning rate is multiplied by `lr_factor` of the schedule."""

    def state_tensors(self) -> dict[str, Tensor]:
        """Every tensor that an exact resume needs, by a unique name."""

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the tensors of `state_tensors` back in place."""


class OptimizerBuilder(Protocol):
    """The target of an `Impl` of kind "optimizer"."""

    def __call__(
        self,
        params: Mapping[str, Parameter],
        *,
        text: TextConfig,
        optim: OptimConfig,
        newton_schulz: Callable[..., Tensor],
    ) -> Optimizer: ...


class JointOptimizer:
    """Several optimizers over disjoint parameters, stepped together."""

    def __init__(self, parts: Mapping[str, Optimizer]) -> None:
        self.parts = dict(parts)

    def step(self, lr_factor: float) -> None:
        """Step every part."""
        for part in self.parts.values():
            part.step(lr_factor)

    def state_tensors(self) -> dict[str, Tensor]:
        """The state of every part, prefixed by its name."""
        return join({name: part.state_tensors() for name, part in self.parts.items()})

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Hand every part its own tensors."""
        for name, part in self.parts.items():
            part.load_state_tensors(part_of(tensors, name))
