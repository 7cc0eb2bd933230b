"""chunk_kda's intermediate states: chunk after chunk, all sequences that still run together.

Legend: L packed tokens, N sequences, G value heads, K key, V value channels, C chunks in all.
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
    device = packed.q_LHK.device
    lengths = torch.tensor(sequences.seqlens)
    starts = lengths.cumsum(0) - lengths
    num_chunks = (lengths + chunk - 1) // chunk
    first_chunk = num_chunks.cumsum(0) - num_chunks
    state_NGVK = state_NGVK.clone()
    o_LGV = torch.zeros_like(packed.v_LGV)
    states_CGVK = state_NGVK.new_zeros(int(num_chunks.sum()), *state_NGVK.shape[1:])
    for step in range(int(num_chunks.max()) if len(lengths) else 0):
        live = (num_chunks > step).nonzero()[:, 0]
        sizes = (lengths[live] - step * chunk).clamp(max=chunk)
        begins = starts[live] + step * chunk
        rows = torch.cat([torch.arange(b, b + s) for b, s in zip(begins, sizes, strict=True)])
        live, rows, slots = (x.to(device) for x in (live, rows, first_chunk[live] + step))
        states_CGVK[slots] = state_NGVK[live]
        offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]).to(device)
        piece = Packed(*(x[rows] for x in packed))
        pieces = Sequences(tuple(sizes.tolist()), offsets)
        o, final = run(piece, A_log, dt_bias, flags, pieces, state_NGVK[live])
        o_LGV[rows], state_NGVK[live] = o, final
    return o_LGV, state_NGVK, states_CGVK
