"""Saving beside the training: the state is copied, a thread writes it (training 2.3)."""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from k3_train.loop import checkpoint


class CheckpointSaver:
    """At most one save is under way; the next one waits for it.

    The copy is in pinned memory for a GPU and is kept from one save to the next. Not thread-safe.
    """

    def __init__(self, root: Path, keep: int, device: torch.device) -> None:
        self.root, self.keep = root, keep
        self._is_cuda = device.type == "cuda"
        self._stager: DefaultStager | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._pending: Future[Path] | None = None

    def start(self, step: int, tensors: Mapping[str, Tensor], meta: dict) -> None:
        """Copy the state and begin to write it; nothing may be under way (`collect` it first).

        The tensors may change as soon as this returns.
        """
        assert self._pending is None, "collect the save that is under way first"
        if self._pool is None or self._stager is None:
            options = StagingOptions(self._is_cuda, False, False, self._is_cuda)
            self._stager = DefaultStager(options)
            self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="k3-checkpoint")
        whole = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        copies: Mapping[str, Tensor] = self._stager.stage(whole)  # type: ignore[assignment]
        self._pending = self._pool.submit(checkpoint.save, self.root, step, copies, meta, self.keep)

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
        if self._pool is not None and self._stager is not None:
            self._pool.shutdown()
            self._stager.close()
        self._pool = self._stager = None
