"""Everything of a run that changes with its steps, as named tensors.

A run resumed from these tensors takes the same steps, bit for bit on a CPU, as one that was never
stopped. The data position is the step itself: batches are a function of their index.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from k3_core.model import K3ForConditionalGeneration
from k3_train.balance.base import Balancer
from k3_train.events.base import Events
from k3_train.loop.checkpoint import CheckpointError
from k3_train.named_tensors import join, part_of
from k3_train.optim.base import Optimizer


@dataclass
class TrainState:
    """The model, what updates it, and how far it is.

    step: finished optimizer steps. tokens: tokens read by them. micro: finished micro-batches of
    the step under way, whose gradients and sums of metrics are then part of the state.
    """

    model: K3ForConditionalGeneration
    optimizer: Optimizer
    balancer: Balancer
    step: int = 0
    tokens: int = 0
    events: Events = field(default_factory=lambda: Events({}))
    micro: int = 0
    metrics: dict[str, Tensor] = field(default_factory=dict)

    @property
    def meta(self) -> dict[str, int]:
        """Where the run is, in numbers."""
        return {"step": self.step, "tokens": self.tokens, "micro": self.micro}

    def tensors(self) -> dict[str, Tensor]:
        """The state, live (not copied): model, optimizer, balancer, events and generators."""
        parts = {
            "model": dict(self.model.named_parameters()) | dict(self.model.named_buffers()),
            "optimizer": self.optimizer.state_tensors(),
            "balancer": self.balancer.state_tensors(),
            "events": self.events.state_tensors(),
            "rng": _rng_states(),
        }
        if self.micro:
            named = self.model.named_parameters()
            grads = {name: param.grad for name, param in named if param.grad is not None}
            parts |= {"gradients": grads, "metrics": self.metrics}
        return {name: tensor.detach() for name, tensor in join(parts).items()}

    def snapshot(self) -> tuple[dict[str, Tensor], dict[str, int]]:
        """A copy of the state, for `restore`."""
        return {name: tensor.clone() for name, tensor in self.tensors().items()}, self.meta

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor], meta: Mapping[str, int]) -> None:
        """Take a state back in place. CheckpointError names tensors that do not fit."""
        own = {name: t for name, t in self.tensors().items() if name.startswith("model.")}
        given = {name: t for name, t in tensors.items() if name.startswith("model.")}
        wrong = sorted(
            name
            for name in own.keys() | given.keys()
            if name not in own or name not in given or own[name].shape != given[name].shape
        )
        if wrong:
            raise CheckpointError(
                f"the checkpoint does not fit the model: {len(wrong)} tensors are missing, extra "
                f"or of another shape, first {wrong[0]}; the run's model settings were changed"
            )
        for name, tensor in own.items():
            tensor.copy_(given[name])
        self.optimizer.load_state_tensors(part_of(tensors, "optimizer"))
        self.balancer.load_state_tensors(part_of(tensors, "balancer"))
        self.events.load_state_tensors(part_of(tensors, "events"))
        _set_rng_states(part_of(tensors, "rng"))
        grads = part_of(tensors, "gradients")
        for name, param in self.model.named_parameters():
            grad = grads.get(name)
            param.grad = None if grad is None else grad.to(param.device, copy=True)
        self.metrics = {
            name: tensor.to(self.model.device, copy=True)
            for name, tensor in part_of(tensors, "metrics").items()
        }
        self.step, self.tokens, self.micro = meta["step"], meta["tokens"], meta.get("micro", 0)


def _rng_states() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _set_rng_states(states: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"].cpu())
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"].cpu())
