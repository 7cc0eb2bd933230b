"""Which layer and which op made a step bad: its micro-batches are run again, watched op by op.

Nothing of the run changes by it: gradients, random generators, counts of the balancer, of the loads
and of events are put back. It takes as long as a slow step and happens at bad ones only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from k3_train.events.probe import FirstBad, LargestByLayer, Probe, name_modules

if TYPE_CHECKING:
    from k3_train.loop.trainer import Trainer


@dataclass(frozen=True)
class Finding:
    """Where it happened. layer: a module's or parameter's name. op: as torch names it.

    phase: parameters, forward, backward or nowhere. text: all of it in words.
    """

    phase: str
    layer: str
    op: str
    text: str


def find_non_finite(trainer: Trainer) -> Finding:
    """The first op of the step under way that gives a NaN or an infinity, and its layer."""
    for name, param in trainer.state.model.named_parameters():
        if not bool(torch.isfinite(param).all()):
            return Finding("parameters", name, "", f"the parameter {name} itself is not finite")
    probe = FirstBad()
    with _replayed(trainer, probe):
        for batch in trainer.stepper.batches:
            if probe.found is None:
                trainer.stepper.replay(batch)
    if probe.found is None:
        return Finding("nowhere", "", "", "run again, the step is finite, so it does not repeat")
    what, seen = probe.found
    text = f"{what} appears in the {seen.phase} of {seen.layer}, op {seen.op}"
    return Finding(seen.phase, seen.layer, seen.op, text)


def find_largest(trainer: Trainer) -> Finding:
    """The layer whose parameter has the most of the gradient, and its op of the largest value."""
    squares = {
        name: float(param.grad.double().square().sum())
        for name, param in trainer.state.model.named_parameters()
        if param.grad is not None
    }
    parameter = max(squares, key=lambda name: squares[name])
    share = 100 * squares[parameter] / (sum(squares.values()) or 1.0)
    probe = LargestByLayer()
    with _replayed(trainer, probe):
        for batch in trainer.stepper.batches:
            trainer.stepper.replay(batch)
    layer = parameter.rpartition(".")[0]
    # A weight that an op takes directly has no module that runs: then the largest of all.
    value, seen = probe.largest.get(layer) or max(probe.largest.values(), key=lambda one: one[0])
    text = (
        f"{parameter} has {share:.0f}% of the squared gradient norm; the largest value there is "
        f"{value:.3g}, in the {seen.phase} of {seen.layer}, op {seen.op}"
    )
    return Finding(seen.phase, layer, seen.op, text)


@contextmanager
def _replayed(trainer: Trainer, probe: Probe) -> Iterator[None]:
    """The probe watches what runs inside; the state of the run is put back at the end."""
    state, loads = trainer.state, trainer.loads.counts_LE
    params = list(state.model.parameters())
    grads = [param.grad for param in params]
    rng, counts_LE = torch.get_rng_state(), loads.clone()
    cuda = torch.cuda.get_rng_state() if trainer.stepper.device.type == "cuda" else None
    balance = {name: one.clone() for name, one in state.balancer.state_tensors().items()}
    events = {name: one.clone() for name, one in state.events.state_tensors().items()}
    for param in params:
        param.grad = None
    try:
        with name_modules(state.model, probe), probe:
            yield
    finally:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        state.balancer.forget()
        state.balancer.load_state_tensors(balance)
        state.events.load_state_tensors(events)
        loads.copy_(counts_LE)
        torch.set_rng_state(rng)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)
