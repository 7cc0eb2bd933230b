"""One optimizer step: micro-batches, clipping, update, balancing (report 5, training 5).

T packed tokens of one micro-batch. Nothing here waits for a GPU: losses and norms stay on the
device until a log row asks for them.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from k3_core.model.batch import SequenceBatch
from k3_train.data.sampler import IGNORE_INDEX, Batch
from k3_train.loop.state import TrainState


class Stepper:
    """Takes steps on a `TrainState`."""

    def __init__(
        self, state: TrainState, *, device: torch.device, clip_norm: float, mtp_weight: float
    ) -> None:
        self.state = state
        self.device = device
        self.clip_norm = clip_norm
        self.mtp_weight = mtp_weight
        self.params = [p for p in state.model.parameters() if p.requires_grad]
        self.batches: Sequence[Batch] = ()
        """Of the step under way or, between two, of the last one."""

    def step(
        self,
        batches: Sequence[Batch],
        lr_factor: float,
        on_gradients: Callable[[], None] | None = None,
        accepts: Callable[[dict[str, Tensor]], bool] | None = None,
    ) -> tuple[dict[str, Tensor], Tensor]:
        """One update from its micro-batches; returns the metrics and the gradient norm.

        on_gradients is called when the gradients of all micro-batches are there, unclipped.
        accepts is then asked with the metrics and the norm: when it says no, the batches count as
        read, and nothing else of them stays. A step that was left between two micro-batches
        (`TrainState.micro`) goes on from there.

        Each micro-batch weighs as much as its share of the labels that count, so that the step
        does not depend on how its tokens are cut into micro-batches.
        """
        self.accumulate(batches, until=len(batches))
        if on_gradients is not None:
            on_gradients()
        state = self.state
        norm = nn.utils.clip_grad_norm_(self.params, self.clip_norm or float("inf"))
        metrics, state.metrics, state.micro = state.metrics, {}, 0
        if accepts is None or accepts({**metrics, "grad_norm": norm}):
            state.optimizer.step(lr_factor)
            state.balancer.update()
        else:
            state.balancer.forget()
        for param in self.params:
            param.grad = None
        state.step += 1
        state.tokens += sum(len(batch.input_ids) for batch in batches)
        return metrics, norm

    def accumulate(self, batches: Sequence[Batch], until: int) -> None:
        """Add the gradients of the micro-batches of a step up to number `until` (not included)."""
        self.batches, state = batches, self.state
        counts = [int((batch.labels != IGNORE_INDEX).sum()) for batch in batches]
        total = max(1, sum(counts))
        for index in range(state.micro, until):
            for name, value in self._backward(batches[index], counts[index] / total).items():
                sums = state.metrics
                sums[name] = sums[name] + value if name in sums else value
            state.micro = index + 1

    def replay(self, batch: Batch) -> None:
        """Forward and backward of one micro-batch again, alone; gradients and counts grow."""
        self._backward(batch, 1.0)

    def _backward(self, batch: Batch, weight: float) -> dict[str, Tensor]:
        ids_T = self._to_device(batch.input_ids)
        labels_T = self._to_device(batch.labels)
        packed = SequenceBatch.from_lengths(batch.seqlens, device=self.device)
        share = getattr(self.state.balancer, "share", None)
        if share is not None:
            share.fill_(weight)
        with self._precision():
            loss, metrics = self.state.model.training_loss(
                ids_T, labels_T, packed, mtp_weight=self.mtp_weight
            )
        (loss * weight).backward()
        return {name: value.detach() * weight for name, value in metrics.items()}

    def _to_device(self, tensor: Tensor) -> Tensor:
        if self.device.type == "cuda":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor

    def _precision(self) -> torch.autocast | nullcontext:
        """bf16 matrices over fp32 parameters on a GPU, fp32 on a CPU."""
        if self.device.type == "cuda":
            return torch.autocast("cuda", torch.bfloat16)
        return nullcontext()
