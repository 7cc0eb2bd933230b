"""One restore: a prefix from a tier into pages of the arena that nobody else knows (I5, I11)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from k3_serve.cache.arena import Arena
from k3_serve.cache.tiers.disk import DiskTier
from k3_serve.cache.tiers.files import BadFile
from k3_serve.cache.tiers.host import HostTier
from k3_serve.cache.tiers.ledger import Entry

logger = logging.getLogger("k3_serve.tiers")
Source: TypeAlias = HostTier | DiskTier


@dataclass(eq=False)
class Restore:
    """Copies an entry's state into `extent` and those of its latents that are missing into pages.

    pages: (key, page of the arena). After `cancel` nothing more is written. `failure` is None or
    why it could not be done; `seconds` and `num_bytes` are by kind, "state" and "mla".
    """

    tier: Source
    entry: Entry
    extent: list[int]
    pages: list[tuple[bytes, int]]
    arena: Arena
    failure: str | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    num_bytes: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._is_cancelled = False
        device = self.arena.bytes_PB.device
        self._fence = torch.cuda.Event() if device.type == "cuda" else None
        if self._fence is not None:
            self._fence.record()  # steps that were launched may still read the pages

    def cancel(self) -> None:
        """Stops it; when this returns, its pages may be given to others."""
        with self._lock:
            self._is_cancelled = True

    def run(self) -> None:
        """Copies; called from a worker's thread."""
        try:
            with _beside(self.arena.bytes_PB.device, self._fence):
                self._copy("state", self.extent, self._state())
                self._copy("mla", [page for _, page in self.pages], self._latents())
        except BadFile as error:
            logger.warning(
                "a prefix of %d tokens is computed again: %s", self.entry.num_tokens, error
            )
            self.failure = error.reason
        except Exception as error:
            logger.exception("a prefix of %d tokens is computed again", self.entry.num_tokens)
            self.failure = type(error).__name__

    def _state(self) -> Iterator[Tensor]:
        yield self.tier.read_state(self.entry, self.arena.bytes_PB.device)

    def _latents(self) -> Iterator[Tensor]:
        keys = [key for key, _ in self.pages]
        return self.tier.read_pages(self.entry, keys, self.arena.bytes_PB.device)

    def _copy(self, kind: str, pages: list[int], pieces: Iterator[Tensor]) -> None:
        begin, done = time.perf_counter(), 0
        for piece_NB in pieces:
            with self._lock:
                if self._is_cancelled:
                    return
                self.arena.write_pages(pages[done : done + len(piece_NB)], piece_NB)
                if piece_NB.is_cuda:
                    torch.cuda.current_stream().synchronize()
            done += len(piece_NB)
        self.seconds[kind] = time.perf_counter() - begin
        self.num_bytes[kind] = done * self.arena.layout.page_bytes


@contextmanager
def _beside(device: torch.device, fence: torch.cuda.Event | None) -> Iterator[None]:
    """Work on a stream of its own, behind what the engine had launched."""
    if fence is None:
        yield
        return
    with torch.cuda.stream(torch.cuda.Stream(device)):
        fence.wait()
        yield
