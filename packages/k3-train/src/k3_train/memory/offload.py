"""Offload: saved tensors wait in the host's memory and come back ahead of the backward.

On a GPU both ways are copies on a stream of their own, from and to pinned memory. The device's
memory is allocated on the stream that computes, and given back in that stream's order: it waits
for a copy before what is copied is let go. N values of a tensor.
"""

from __future__ import annotations

from collections import deque
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor

from k3_train.memory.base import MemoryPolicy, Packed

MIN_BYTES = 1 << 16
"""Smaller tensors stay: a copy costs the host more than they are worth."""
OUT_BYTES = 512 << 20
"""On their way out at most; then the computation waits for the oldest."""
AHEAD_BYTES = 512 << 20
"""Brought back at most ahead of the tensor that the backward asks for."""
AHEAD = 64
"""Tensors looked at for that."""


class Offload(MemoryPolicy):
    """Moves every large tensor: activations, and what ops keep for themselves."""

    order = 20

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._moved: WeakValueDictionary[int, _Moved] = WeakValueDictionary()
        self._going: deque[tuple[ref[_Moved], int]] = deque()
        self._going_bytes = 0
        self._count = 0

    def wants(self, x: Tensor) -> bool:
        """Tensors of the device that are worth a copy."""
        return x.nbytes >= MIN_BYTES and x.device.type == self.device.type

    def pack(self, values_N: Tensor) -> Packed:
        """The values in the host's memory."""
        moved = _Moved(self._count, values_N, self._stream)
        self._moved[self._count] = moved
        self._count += 1
        self._going.append((ref(moved), values_N.nbytes))
        self._going_bytes += values_N.nbytes
        while self._going and (self._stream is None or self._going_bytes > OUT_BYTES):
            oldest, num_bytes = self._going.popleft()
            self._going_bytes -= num_bytes
            if (gone := oldest()) is not None:
                gone.let_go()
        return Packed((), lambda: self._fetch(moved))

    def _fetch(self, moved: _Moved) -> Tensor:
        """The values on the device; what was saved just before them is wanted next."""
        moved.bring()
        num_bytes = 0
        for number in range(moved.number - 1, moved.number - 1 - AHEAD, -1):
            earlier = self._moved.get(number)
            if earlier is not None and num_bytes < AHEAD_BYTES:
                num_bytes += earlier.bring()
        return moved.wait()


class _Moved:
    """Values and their copy on the host. They are on the device until `let_go`, and from `bring`
    until the graph has no more use for them."""

    def __init__(self, number: int, values_N: Tensor, stream: torch.cuda.Stream | None) -> None:
        self.number = number
        self._stream, self._device = stream, values_N.device
        self._values_N: Tensor | None = values_N
        self._event: torch.cuda.Event | None = None
        self._host_N = torch.empty(
            values_N.shape, dtype=values_N.dtype, pin_memory=stream is not None
        )
        self._copy(self._host_N, values_N)

    def _copy(self, target_N: Tensor, source_N: Tensor) -> None:
        """Begin a copy, behind all that computes so far."""
        if self._stream is None:
            target_N.copy_(source_N)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target_N.copy_(source_N, non_blocking=True)
        self._event = self._stream.record_event()

    def _join(self) -> None:
        """The computation goes on when the last copy is done."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)
            self._event = None

    def let_go(self) -> None:
        """The values are on the host only."""
        self._join()
        self._values_N = None

    def bring(self) -> int:
        """Begin the way back, where they are not on the device; bytes that are on their way."""
        if self._values_N is not None:
            return 0
        self._values_N = torch.empty_like(self._host_N, device=self._device, pin_memory=False)
        self._copy(self._values_N, self._host_N)
        return self._values_N.nbytes

    def wait(self) -> Tensor:
        """The values, for what computes next."""
        self._join()
        assert self._values_N is not None
        return self._values_N

    def __del__(self) -> None:
        # A copy that nobody waited for must not run into the memory's next user.
        self._join()
