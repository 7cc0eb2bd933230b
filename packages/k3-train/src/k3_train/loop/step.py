"""One optimizer step: micro-batches, clipping, update, balancing (report 5, training 5).

T packed tokens of one micro-batch. Nothing here waits for a GPU: losses and norms stay on the
device until a log row asks for them.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from k3_train.data.sampler import IGNORE_INDEX, Batch
from k3_train.loop.state import TrainState
from k3_train.packed import packed, to_device
from k3_train.precision import training_precision


def count_labels(batch: Batch) -> tuple[int, int]:
    """Labels that count, of the next token and of the MTP layer's token after it.

    The MTP layer predicts at a token what the next one is labelled with, so the label of the first
    token of a sequence is nobody's.
    """
    is_counted_T = batch.labels != IGNORE_INDEX
    ends = accumulate(length for length in batch.seqlens if length)
    firsts = [0, *ends][:-1]
    count = int(is_counted_T.sum())
    return count, count - int(is_counted_T[firsts].sum())


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

        Each micro-batch weighs as much as its share of the labels that count, of each loss, so that
        the step does not depend on how its tokens are cut into micro-batches.
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
        counts = [count_labels(batch) for batch in batches]
        total, mtp_total = (max(1, sum(of_loss)) for of_loss in zip(*counts, strict=True))
        for index in range(state.micro, until):
            count, mtp_count = counts[index]
            metrics = self._backward(batches[index], count / total, mtp_count / mtp_total)
            for name, value in metrics.items():
                sums = state.metrics
                sums[name] = sums[name] + value if name in sums else value
            state.micro = index + 1

    def replay(self, batch: Batch) -> None:
        """Forward and backward of one micro-batch again, alone; gradients and counts grow."""
        self._backward(batch, 1.0, 1.0)

    def _backward(self, batch: Batch, share: float, mtp_share: float) -> dict[str, Tensor]:
        """Metrics of a micro-batch, given its shares in the two losses of the step."""
        ids_T, labels_T = (to_device(one, self.device) for one in (batch.input_ids, batch.labels))
        sequences = packed(batch, self.device)
        told = getattr(self.state.balancer, "share", None)
        if told is not None:
            told.fill_(share)
        # A batch without labels for the loss has none for that of MTP.
        mtp_weight = self.mtp_weight * mtp_share / share if share else 0.0
        with training_precision(self.device):
            loss, metrics = self.state.model.training_loss(
                ids_T, labels_T, sequences, mtp_weight=mtp_weight
            )
        (loss * share).backward()
        shares = {"mtp_loss": mtp_share}
        return {name: value.detach() * shares.get(name, share) for name, value in metrics.items()}
