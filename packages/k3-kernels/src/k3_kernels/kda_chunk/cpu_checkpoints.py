"""States inside sequences from a form that gives final ones: what lies between two checkpoints of a
sequence runs as a sequence of its own (serving 9: checkpoints of the prefix cache).

Legend: T packed tokens, N sequences, H heads, K key, V value channels, E checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Run = Callable[[Sequence[Tensor], Sequence[int], Tensor], list[Tensor]]
"""(the seven inputs, lengths, initial state) -> o [T, H, V] and the final state."""


def run_with_checkpoints(
    run: Run,
    tensors: Sequence[Tensor],
    lengths: Sequence[int],
    state_NHVK: Tensor,
    offsets: Sequence[Sequence[int]],
    checkpoints_EHVK: Tensor,
) -> tuple[Tensor, Tensor]:
    """o and the final state; as many calls of `run` as the most pieces of a sequence, each over one
    piece of every sequence that has so many."""
    bounds = [
        [0, *own, *([] if own and own[-1] == n else [n])]
        for own, n in zip(offsets, lengths, strict=True)
    ]
    starts = [sum(lengths[:n]) for n in range(len(lengths))]
    first = [sum(map(len, offsets[:n])) for n in range(len(offsets))]
    device = state_NHVK.device
    o_THV = torch.empty_like(tensors[2])
    finals = list(state_NHVK.unbind())
    for step in range(max(map(len, bounds), default=1) - 1):
        own = [n for n, ends in enumerate(bounds) if step + 1 < len(ends)]
        spans = [(starts[n] + bounds[n][step], starts[n] + bounds[n][step + 1]) for n in own]
        rows = torch.cat([torch.arange(*span) for span in spans]).to(device)
        pieces = [x[rows] for x in tensors[:5]]
        states = torch.stack([finals[n] for n in own])
        o, after = run([*pieces, *tensors[5:]], [b - a for a, b in spans], states)
        o_THV = o_THV.index_copy(0, rows, o)
        for place, n in enumerate(own):
            finals[n] = after[place]
            if step < len(offsets[n]):
                with torch.no_grad():
                    checkpoints_EHVK[first[n] + step] = after[place]
    return o_THV, torch.stack(finals) if finals else state_NHVK.clone()
