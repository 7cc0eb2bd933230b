"""A thread that copies beside the engine's."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Protocol

import torch

logger = logging.getLogger("k3_serve.tiers")
Job = Callable[[], None]


class Worker(Protocol):
    """Runs jobs one after the other, in the order of submission."""

    def submit(self, job: Job, is_optional: bool = False) -> bool:
        """False when the queue is full and the job optional: it is not run."""

    def close(self, seconds: float) -> None:
        """Waits for what is queued, no longer than given; the rest is not run."""


class ThreadWorker:
    """A daemon thread, with at most `limit` jobs in its queue when another optional one comes."""

    def __init__(self, name: str, limit: int) -> None:
        self._limit = limit
        self._is_late = False
        self._jobs: queue.Queue[Job | None] = queue.Queue()
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Job, is_optional: bool = False) -> bool:
        if is_optional and self._jobs.qsize() >= self._limit:
            return False
        self._jobs.put(job)
        return True

    def close(self, seconds: float) -> None:
        self._jobs.put(None)
        self._thread.join(seconds)
        self._is_late = True

    def _loop(self) -> None:
        with torch.inference_mode():  # the arena may be a tensor of that mode
            while (job := self._jobs.get()) is not None and not self._is_late:
                try:
                    job()
                except Exception:
                    logger.exception("a copy between tiers failed")
