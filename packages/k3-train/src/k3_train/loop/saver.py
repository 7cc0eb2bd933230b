"""Saving beside the training: the state is copied, a thread writes it (training 2.3)."""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from k3_train.loop import checkpoint


class CheckpointSaver:
    """At most one save is under way. Not thread-safe.

    The copies are kept from one save to the next, in pinned memory for a GPU. They are made here:
    torch 2.11's own stager works once, and pinning anew each time would cost more than the copy.
    """

    def __init__(self, root: Path, keep: int, device: torch.device) -> None:
        self.root, self.keep, self.device = root, keep, device
        self._copies: dict[str, Tensor] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._pending: Future[Path] | None = None

    def start(self, step: int, tensors: Mapping[str, Tensor], meta: dict) -> None:
        """Copy the state and begin to write it; nothing may be under way (`collect` it first).

        The tensors may change as soon as this returns.
        """
        assert self._pending is None, "collect the save that is under way first"
        if self._pool is None:
            self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="k3-checkpoint")
        self._copies = {name: self._copied(name, one) for name, one in tensors.items()}
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._pending = self._pool.submit(
            checkpoint.save, self.root, step, self._copies, meta, self.keep
        )

    def collect(self, *, wait: bool) -> Path | None:
        """The folder of a save that has become complete since the last call, told once.

        wait: for the one under way. Raises CheckpointError when it failed.
        """
        pending = self._pending
        if pending is None or not (wait or pending.done()):
            return None
        self._pending = None
        return pending.result()

    def close(self) -> None:
        """Wait for the thread and free the copies; `start` may be called again."""
        if self._pool is not None:
            self._pool.shutdown()
        self._pool, self._copies = None, {}

    def _copied(self, name: str, tensor: Tensor) -> Tensor:
        copy = self._copies.get(name)
        if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
            is_pinned = tensor.is_cuda
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_pinned)
        return copy.copy_(tensor.detach(), non_blocking=True)
