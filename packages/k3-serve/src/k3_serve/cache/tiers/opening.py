"""Makes the tiers of an engine, and the name under which files keep its weights' prefixes."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from k3_core.errors import K3Error
from k3_serve.cache.tiers.disk import DiskTier
from k3_serve.cache.tiers.host import HostTier
from k3_serve.cache.tiers.store import TierStore
from k3_serve.cache.tiers.worker import ThreadWorker, Worker
from k3_serve.observer import Observer

if TYPE_CHECKING:
    from k3_core.model import K3ForConditionalGeneration
    from k3_serve.cache.arena import ArenaLayout

STAGING_BYTES = 256 << 20
"""Host memory through which files are written when no more was asked for."""
WRITES = 16
"""Prefixes that wait to be written at most."""
CHUNK = 1 << 20
"""Words that are summed at once for a fingerprint."""


def open_tiers(
    model: K3ForConditionalGeneration,
    layout: ArenaLayout,
    unit: int,
    wanted: tuple[int, Path | None, int],
    observer: Observer,
    worker: Callable[[str, int], Worker] = ThreadWorker,
) -> TierStore | None:
    """The tiers of an engine; None when neither is asked for.

    wanted: bytes of host memory, folder of files, bytes of files. worker: makes a worker of a
    name with a queue of a length.
    Raises K3Error for a size that holds not even one checkpoint, and for a folder that cannot be
    used.
    """
    cpu_bytes, folder, disk_bytes = wanted
    if not cpu_bytes and folder is None:
        return None
    least = layout.row_bytes + layout.page_bytes
    cpu_bytes = cpu_bytes or max(STAGING_BYTES, 4 * least)
    for name, size in (("CPU", cpu_bytes), ("disk", disk_bytes)):
        if size < least and (name == "CPU" or folder is not None):
            raise K3Error(
                f"a {name} cache of {size} bytes does not hold one checkpoint and a page, "
                f"{least} bytes; make it larger"
            )
    host = HostTier(layout, cpu_bytes, model.device)
    disk = None
    if folder is not None:
        disk = DiskTier(folder, disk_bytes, layout, space_of(layout, model, unit))
    writer, reader = worker("k3-tier-writer", WRITES), worker("k3-tier-reader", WRITES)
    return TierStore(host, disk, writer, reader, observer)


def space_of(layout: ArenaLayout, model: K3ForConditionalGeneration, unit: int) -> str:
    """What the bytes of a file depend on beside its key, as 32 hex digits.

    The model's shape, every weight, the unit and the layout of pages and states.
    """
    digest = blake2b(digest_size=16, person=b"k3-cache-space")
    digest.update(repr((unit, layout)).encode())
    digest.update(repr(model.config).encode())
    for name, weight in model.state_dict().items():
        digest.update(repr((name, tuple(weight.shape), str(weight.dtype))).encode())
        digest.update(fingerprint(weight))
    return digest.hexdigest()


def fingerprint(weight: Tensor) -> bytes:
    """Weighted sums of a tensor's 64-bit words, which any change of a value changes.

    It is taken where the tensor is, at the speed of its memory; it is no cryptographic hash.
    """
    data = weight.detach().contiguous().view(-1).view(torch.uint8)
    data = torch.nn.functional.pad(data, (0, -len(data) % 8))
    factors = torch.arange(1, 2 * CHUNK, 2, device=data.device)
    sums = [(words * factors[: len(words)]).sum() for words in data.view(torch.int64).split(CHUNK)]
    return torch.stack(sums).cpu().numpy().tobytes() if sums else b""
