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
"""On the device ahead of the tensor that the backward asks for."""
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
                earlier.bring()
                num_bytes += earlier.num_bytes
        return moved.wait()


class _Moved:
    """Values and their copy on the host. They are on the device until `let_go`, and from `bring`
    until the graph has no more use for them."""

    def __init__(self, number: int, values_N: Tensor, stream: torch.cuda.Stream | None) -> None:
        self.number, self.num_bytes = number, values_N.nbytes
        self._stream, self._device = stream, values_N.device
        self._values_N: Tensor | None = values_N
        self._host_N = torch.empty(
            values_N.shape, dtype=values_N.dtype, pin_memory=stream is not None
        )
        self._out = self._copy(self._host_N, values_N)
        self._in: torch.cuda.Event | None = None

    def _copy(self, target_N: Tensor, source_N: Tensor) -> torch.cuda.Event | None:
        """Begin a copy behind all that computes so far; what tells its end."""
        if self._stream is None:
            target_N.copy_(source_N)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target_N.copy_(source_N, non_blocking=True)
        return self._stream.record_event()

    def _join(self, event: torch.cuda.Event | None) -> None:
        """The computation goes on when the copy is done."""
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def let_go(self) -> None:
        """The values are on the host only."""
        self._join(self._out)
        self._values_N = None

    def bring(self) -> None:
        """Begin the way back, where they are not on the device."""
        if self._values_N is None:
            shape, dtype = self._host_N.shape, self._host_N.dtype
            self._values_N = torch.empty(shape, dtype=dtype, device=self._device)
            self._in = self._copy(self._values_N, self._host_N)

    def wait(self) -> Tensor:
        """The values, for what computes next."""
        assert self._values_N is not None
        self._join(self._in)
        self._in = None
        return self._values_N

    def __del__(self) -> None:
        # A copy that nobody waited for must not run into the next user of the device's memory.
        self._join(self._in)
