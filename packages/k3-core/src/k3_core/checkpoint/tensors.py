"""Tensor bytes from and to files, a slice at a time, so that memory stays at the model's size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

import torch
from torch import Tensor

from .headers import CheckpointError, TensorEntry

CHUNK_BYTES = 4 * 2**20
TORCH_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "U8": torch.uint8,
}


class TensorReader:
    """Reads tensors of checkpoint files through one buffer; keeps the last file open."""

    def __init__(self) -> None:
        self._buffer = torch.empty(CHUNK_BYTES, dtype=torch.uint8)
        self._file: BinaryIO | None = None

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._file is not None:
            self._file.close()

    def read(self, entry: TensorEntry) -> Tensor:
        """A new tensor in the stored dtype, on the host."""
        tensor = torch.empty(entry.shape, dtype=TORCH_DTYPES[entry.dtype])
        self.read_into(entry, tensor)
        return tensor

    @torch.no_grad()
    def read_into(self, entry: TensorEntry, target: Tensor) -> None:
        """Copy a stored tensor into a contiguous `target` of the same shape, any dtype, device."""
        flat, position = target.view(-1), 0
        for chunk in self._chunks(entry):
            flat[position : position + chunk.numel()].copy_(chunk)
            position += chunk.numel()

    def _chunks(self, entry: TensorEntry) -> Iterator[Tensor]:
        stream = self._open(entry)
        memory, left = self._buffer.numpy().data, entry.num_bytes
        while left:
            size = min(left, CHUNK_BYTES)
            if stream.readinto(memory[:size]) != size:  # type: ignore[attr-defined]
                raise CheckpointError(
                    f"tensor {entry.name} in {entry.file} is truncated. Download the file again"
                )
            yield self._buffer[:size].view(TORCH_DTYPES[entry.dtype])
            left -= size

    def _open(self, entry: TensorEntry) -> BinaryIO:
        if self._file is None or self._file.name != str(entry.file):
            if self._file is not None:
                self._file.close()
            self._file = open(entry.file, "rb")  # noqa: SIM115 - kept for the next tensor
        self._file.seek(entry.offset)
        return self._file


@torch.no_grad()
def write_tensor(stream: BinaryIO, tensor: Tensor, dtype: torch.dtype) -> None:
    """Append the bytes of `tensor` as `dtype`."""
    flat = tensor.reshape(-1)
    step = CHUNK_BYTES // dtype.itemsize
    for start in range(0, flat.numel(), step):
        chunk = flat[start : start + step].to(device="cpu", dtype=dtype)
        stream.write(chunk.contiguous().view(torch.uint8).numpy().data)
