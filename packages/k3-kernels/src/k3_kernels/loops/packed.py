"""Packed sequences in loops: their offsets are read and checked where they are used.

T packed tokens, N sequences.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from k3_kernels.loops import compiled

_NO_LENGTHS = np.full(1, -1)


def as_offsets(cu_seqlens_N1: Tensor) -> Tensor | None:
    """The offsets as loops read them, int64 on a CPU; None for what is no such tensor."""
    is_known = cu_seqlens_N1.dtype is torch.int64 or cu_seqlens_N1.dtype is torch.int32
    if not is_known or cu_seqlens_N1.dim() != 1 or not len(cu_seqlens_N1):
        return None
    return cu_seqlens_N1.long().contiguous() if cu_seqlens_N1.is_cpu else None


def as_lengths(seqlens: tuple[int, ...] | None) -> np.ndarray:
    """The host copy of the lengths for `offsets_fit`."""
    return _NO_LENGTHS if seqlens is None else np.array(seqlens, dtype=np.int64)


@compiled
def offsets_fit(cu_N1: np.ndarray, lengths_N: np.ndarray, num_tokens: int) -> bool:
    """Whether the offsets lead from 0 to T, never back, by the lengths where these are given."""
    num_sequences = len(cu_N1) - 1
    has_lengths = len(lengths_N) != 1 or lengths_N[0] != -1
    if cu_N1[0] != 0 or cu_N1[num_sequences] != num_tokens:
        return False
    if has_lengths and len(lengths_N) != num_sequences:
        return False
    for n in range(num_sequences):
        length = cu_N1[n + 1] - cu_N1[n]
        if length < 0 or (has_lengths and length != lengths_N[n]):
            return False
    return True
