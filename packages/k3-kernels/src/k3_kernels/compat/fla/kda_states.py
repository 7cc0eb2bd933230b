"""chunk_kda's intermediate states: initial states, and checkpoints of K3's op between chunks.

Legend: L packed tokens, N sequences, G value heads, K key, V value channels, C chunks in all, E
those that are not the first of a sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3_kernels.compat.fla.kda_inputs import Flags, Packed, Sequences, run


def run_with_states(
    packed: Packed,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    flags: Flags,
    sequences: Sequences,
    state_NGVK: Tensor,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """o `[L, G, V]`, final states and the states before each chunk `[C, G, V, K]`, by sequence."""
    if torch.is_grad_enabled():
        raise ValueError(
            "return_intermediate_states=True gives states without gradients; call it under "
            "torch.no_grad() or torch.inference_mode()"
        )
    lengths = sequences.seqlens
    offsets = tuple(tuple(range(chunk, length, chunk)) for length in lengths)
    counts = [len(own) for own in offsets]
    states_EGVK = state_NGVK.new_empty(sum(counts), *state_NGVK.shape[1:])
    o, final = run(packed, A_log, dt_bias, flags, sequences, state_NGVK, offsets, states_EGVK)
    states = [states_EGVK[:0]]
    for n, inner in enumerate(states_EGVK.split(counts)):
        if lengths[n]:  # a sequence without tokens has no chunk
            states += [state_NGVK[n : n + 1], inner]
    return o, final, torch.cat(states)
