"""The serial part of the chunk form: states through all chunks, forward and reverse (report 1.2).

One step handles one chunk of every sequence that still runs, all heads at once; the running
states are sorted so that these are a prefix. States are updated in place, and every product is
written to a contiguous slice, which is what the batched matrix products of the CPU need.
Legend: B chunk-heads in step order, R states (sequences x heads), C tokens in a chunk, K key
channels, V value channels.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

Steps = tuple[int, ...]
"""Chunk-heads of each step."""


def scan_forward(
    state_RVK: Tensor,
    q_BCK: Tensor,
    w_BCK: Tensor,
    values_BCV: Tensor,
    writes_BCK: Tensor,
    total_B1K: Tensor,
    steps: Steps,
    saved_BVK: Tensor | None,
) -> Tensor:
    """Advance the states through all chunks; returns Qp S, the reads of the carried state.

    q is Qp, w is W, `values_BCV` comes in as U and ends as D = U - W S. `state_RVK` ends as the
    final states; `saved_BVK`, when given, receives the state before each chunk.
    """
    o_BCV = torch.empty_like(values_BCV)
    chunks = _by_step(steps, q_BCK, w_BCK, values_BCV, writes_BCK, total_B1K, o_BCV)
    saved_chunks = saved_BVK.split(steps) if saved_BVK is not None else None
    for step, (q, w, values, writes, total, o) in enumerate(chunks):
        state = state_RVK[: steps[step]]
        state_KV = state.mT
        if saved_chunks is not None:
            saved_chunks[step].copy_(state)
        torch.bmm(q, state_KV, out=o)
        values.baddbmm_(w, state_KV, alpha=-1)
        state.mul_(total).baddbmm_(values.mT, writes)
    return o_BCV


def scan_backward(
    d_state_RVK: Tensor,
    d_o_BCV: Tensor,
    d_values_BCV: Tensor,
    q_BCK: Tensor,
    w_BCK: Tensor,
    values_BCV: Tensor,
    writes_BCK: Tensor,
    total_B1K: Tensor,
    saved_BVK: Tensor,
    steps: Steps,
) -> tuple[Tensor, Tensor]:
    """Reverse of `scan_forward` (report 1.3).

    `d_state_RVK` comes in as the gradient of the final states and ends as that of the initial
    ones; `d_values_BCV` comes in as P^T dO and ends as dD. Returns the gradient of the writes
    `[B, C, K]` and of the log of the total decay `[B, K]`.
    """
    d_writes_BCK = torch.empty_like(writes_BCK)
    d_total_BK = total_B1K.new_empty(total_B1K.shape[0], total_B1K.shape[2])
    operands = (d_o_BCV, d_values_BCV, q_BCK, w_BCK, values_BCV, writes_BCK, total_B1K, saved_BVK)
    chunks = list(_by_step(steps, *operands, d_writes_BCK, d_total_BK))
    for step in reversed(range(len(steps))):
        d_o, d_values, q, w, values, writes, total, saved, d_writes, d_total = chunks[step]
        d_state = d_state_RVK[: steps[step]]
        d_values.baddbmm_(writes, d_state.mT)
        torch.bmm(values, d_state, out=d_writes)
        d_state.mul_(total)
        torch.sum(d_state * saved, dim=1, out=d_total)
        d_state.baddbmm_(d_o.mT, q)
        d_state.baddbmm_(d_values.mT, w, alpha=-1)
    return d_writes_BCK, d_total_BK


def _by_step(steps: Steps, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The slices of each step, from tensors whose first axis is in step order."""
    return zip(*(x.split(steps) for x in tensors), strict=True)
