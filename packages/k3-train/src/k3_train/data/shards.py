"""Arrays in files: mapped one by one, or several read as one without joining them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from k3_core.errors import K3Error


def map_array(path: Path, dtype: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """A read-only memory map of the whole file; K3Error when its size is another."""
    expected = int(np.prod(shape)) * np.dtype(dtype).itemsize
    size = path.stat().st_size if path.is_file() else -1
    if size != expected:
        raise K3Error(
            f"{path} has {max(size, 0)} bytes, the manifest asks for {expected}: "
            "the file was cut off or is missing, build it again"
        )
    return (
        np.memmap(path, dtype=dtype, mode="r", shape=shape) if expected else np.zeros(shape, dtype)
    )


class ShardedArray:
    """One-dimensional arrays of one dtype end to end; indexing copies what it is asked for."""

    def __init__(self, shards: Sequence[npt.NDArray[Any]]) -> None:
        self._shards = list(shards)
        self._ends = np.cumsum([len(shard) for shard in shards])
        self.dtype = shards[0].dtype

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, where: Any) -> Any:
        """Elements by an integer, a slice or an array of indices from 0 to the length."""
        if isinstance(where, slice):
            where = np.arange(*where.indices(len(self)))
        index = np.asarray(where, dtype=np.int64)
        if index.size and not 0 <= index.min() <= index.max() < len(self):
            raise IndexError(f"index {index.min()}..{index.max()} of an array of {len(self)}")
        number = np.searchsorted(self._ends, index, side="right")
        values = np.empty(index.shape, self.dtype)
        for one in np.unique(number):
            here = number == one
            start = self._ends[one] - len(self._shards[one])
            values[here] = self._shards[one][index[here] - start]
        return values[()]
