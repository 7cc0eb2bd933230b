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

    def step(
        self,
        batches: Sequence[Batch],
        lr_factor: float,
        on_gradients: Callable[[], None] | None = None,
    ) -> tuple[dict[str, Tensor], Tensor]:
        """One update from its micro-batches; returns the metrics and the gradient norm.

        on_gradients is called when the gradients of all micro-batches are there, unclipped.

        Each micro-batch weighs as much as its share of the labels that count, so that the step
        does not depend on how its tokens are cut into micro-batches.
        """
        counts = [int((batch.labels != IGNORE_INDEX).sum()) for batch in batches]
        total = max(1, sum(counts))
        metrics: dict[str, Tensor] = {}
        for batch, count in zip(batches, counts, strict=True):
            for name, value in self._backward(batch, count / total).items():
                metrics[name] = metrics[name] + value if name in metrics else value
        if on_gradients is not None:
            on_gradients()
        norm = nn.utils.clip_grad_norm_(self.params, self.clip_norm or float("inf"))
        self.state.optimizer.step(lr_factor)
        for param in self.params:
            param.grad = None
        self.state.balancer.update()
        self.state.step += 1
        self.state.tokens += sum(len(batch.input_ids) for batch in batches)
        return metrics, norm

    def _backward(self, batch: Batch, weight: float) -> dict[str, Tensor]:
        ids_T = self._to_device(batch.input_ids)
        labels_T = self._to_device(batch.labels)
        packed = SequenceBatch.from_lengths(batch.seqlens, device=self.device)
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
