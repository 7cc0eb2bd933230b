"""Lengths of packed sequences, checked once on the host (design 4: no padding dimension inside).

Legend: T packed tokens, N sequences; sequence n owns tokens `cu_seqlens[n]:cu_seqlens[n + 1]`.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def host_lengths(
    cu_seqlens_N1: Tensor, seqlens: tuple[int, ...] | None, num_tokens: int, op: str
) -> tuple[int, ...]:
    """The sequence lengths as Python integers.

    `cu_seqlens_N1` is int32 or int64 `[N + 1]`, from 0 to `num_tokens`, not decreasing. `seqlens`
    is its host copy; when given for a tensor on an accelerator the tensor is not read (a read waits
    for the device). Raises TypeError or ValueError naming the value that is wrong.
    """
    if cu_seqlens_N1.dtype not in (torch.int32, torch.int64) or cu_seqlens_N1.dim() != 1:
        raise TypeError(
            f"{op}: cu_seqlens must be a 1-D int32 or int64 tensor [N + 1], got "
            f"{cu_seqlens_N1.dtype} {list(cu_seqlens_N1.shape)}"
        )
    if cu_seqlens_N1.numel() == 0:
        raise ValueError(f"{op}: cu_seqlens is empty; for N sequences pass N + 1 offsets")
    if seqlens is None or cu_seqlens_N1.device.type == "cpu":
        lengths = _lengths_from_offsets(cu_seqlens_N1.tolist(), num_tokens, op)
        if seqlens is not None and tuple(seqlens) != lengths:
            raise ValueError(
                f"{op}: seqlens {tuple(seqlens)} differ from cu_seqlens, which gives {lengths}"
            )
        return lengths
    lengths = tuple(int(n) for n in seqlens)
    if len(lengths) != cu_seqlens_N1.numel() - 1 or min(lengths, default=0) < 0:
        raise ValueError(
            f"{op}: seqlens {lengths} do not match cu_seqlens of {cu_seqlens_N1.numel()} offsets"
        )
    if sum(lengths) != num_tokens:
        raise ValueError(
            f"{op}: seqlens add up to {sum(lengths)}, the input has {num_tokens} tokens"
        )
    return lengths


def _lengths_from_offsets(offsets: list[int], num_tokens: int, op: str) -> tuple[int, ...]:
    if offsets[0] != 0 or offsets[-1] != num_tokens:
        raise ValueError(
            f"{op}: cu_seqlens must start at 0 and end at the number of tokens {num_tokens}, "
            f"got {offsets[0]} and {offsets[-1]}"
        )
    lengths = tuple(b - a for a, b in pairwise(offsets))
    if min(lengths, default=0) < 0:
        raise ValueError(f"{op}: cu_seqlens decreases: {offsets}")
    return lengths
