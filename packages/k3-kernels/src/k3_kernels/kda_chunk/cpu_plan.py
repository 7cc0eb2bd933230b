"""How packed sequences are cut into chunks: index tensors that every chunk computation shares.

Chunks are ordered step first: all first chunks, then all second chunks, and so on, with the
sequences of most chunks leading. At every step of the scan the sequences that still run are then
a prefix of the states, and the step's chunks are one slice.
Legend: T packed tokens, N sequences, H heads, B chunk-heads (chunks x heads), C tokens in a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class ChunkPlan:
    """Index tensors of one packing.

    rows: int64 [B * C], the row of a `[T * H, ...]` tensor behind each chunk position. A padded
      position repeats the last token of its own sequence, so that nothing foreign is read.
    is_padding_BC1: bool, None when no chunk is padded.
    slots: int64 [T * H], the chunk position of each token and head; the inverse of `rows`.
    step_sizes: chunk-heads of each scan step.
    order_N, rank_N: int64, sequences by falling number of chunks, and the inverse permutation.
    """

    num_heads: int
    num_chunks: int
    chunk: int
    rows: Tensor
    is_padding_BC1: Tensor | None
    slots: Tensor
    step_sizes: tuple[int, ...]
    order_N: Tensor
    rank_N: Tensor

    def gather(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """`[T, H, D]` (or `[T, H]`, D = 1) to `[B, C, D]` in `dtype`."""
        x = x.reshape(x.shape[0] * self.num_heads, x.shape[2] if x.dim() == 3 else 1)
        rows = x.index_select(0, self.rows)
        return rows.view(self.num_chunks * self.num_heads, self.chunk, x.shape[1]).to(dtype)

    def scatter(self, x_BCD: Tensor, dtype: torch.dtype) -> Tensor:
        """`[B, C, D]` back to `[T, H, D]` in `dtype`; padded positions are dropped."""
        num_channels = x_BCD.shape[-1]
        rows = x_BCD.reshape(self.rows.numel(), num_channels).index_select(0, self.slots)
        num_tokens = self.slots.numel() // self.num_heads
        return rows.view(num_tokens, self.num_heads, num_channels).to(dtype)

    def zero_padding(self, x_BCD: Tensor) -> Tensor:
        """Zero at padded positions, in place; a select, so that infinities vanish too."""
        if self.is_padding_BC1 is None:
            return x_BCD
        return x_BCD.masked_fill_(self.is_padding_BC1, 0)


@lru_cache(maxsize=16)
def chunk_plan(
    lengths: tuple[int, ...], num_heads: int, chunk: int, device: torch.device
) -> ChunkPlan:
    """The plan of a packing; the layers of a model ask for the same one again and again."""
    with torch.inference_mode(False):
        length_N = torch.tensor(lengths, dtype=torch.int64)
        num_chunks_N = (length_N + chunk - 1) // chunk
        order_N = num_chunks_N.argsort(descending=True, stable=True)
        num_steps = int(num_chunks_N.max()) if lengths else 0
        running = [int((num_chunks_N > step).sum()) for step in range(num_steps)]

        sequence = torch.cat([order_N[:n] for n in running] or [order_N[:0]])
        step = torch.repeat_interleave(torch.arange(num_steps), torch.tensor(running).long())
        offset_XC = step[:, None] * chunk + torch.arange(chunk)
        is_padding_XC = offset_XC >= length_N[sequence, None]
        start_N = length_N.cumsum(0) - length_N
        token_XC = start_N[sequence, None] + offset_XC.minimum(length_N[sequence, None] - 1)

        rows_XHC = token_XC[:, None] * num_heads + torch.arange(num_heads)[:, None]
        is_padding_XHC = is_padding_XC[:, None].expand(rows_XHC.shape)
        positions = torch.arange(rows_XHC.numel()).view(rows_XHC.shape)
        slots = torch.empty(int(length_N.sum()) * num_heads, dtype=torch.int64)
        slots[rows_XHC[~is_padding_XHC]] = positions[~is_padding_XHC]
        has_padding = bool(is_padding_XC.any())
        return ChunkPlan(
            num_heads=num_heads,
            num_chunks=len(sequence),
            chunk=chunk,
            rows=rows_XHC.flatten().to(device),
            is_padding_BC1=is_padding_XHC.reshape(-1, chunk, 1).to(device) if has_padding else None,
            slots=slots.to(device),
            step_sizes=tuple(n * num_heads for n in running),
            order_N=order_N.to(device),
            rank_N=order_N.argsort().to(device),
        )
