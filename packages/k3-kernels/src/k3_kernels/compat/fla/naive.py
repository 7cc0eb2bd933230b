"""fla.ops.kda.naive: the recurrence token by token, and the chunk form, on log decays.

Legend: B rows, T tokens, H key heads, G value heads, K key, V value channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3_core.ops.kda_chunk.inputs import repeat_heads
from k3_core.ops.kda_chunk.reference import delta_step
from k3_core.ops.math import math_dtype
from k3_kernels.compat.fla.kda import chunk_kda


def naive_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The definition of KDA, one token after another; shapes as `chunk_kda`, states `[.., K, V]`.

    An initial state `[H, K, V]` is that of every row.
    """
    dtype = math_dtype(q)
    q, k = (repeat_heads(x.to(dtype), v.shape[2]) for x in (q, k))
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    state_BGVK = q.new_zeros(q.shape[0], q.shape[2], v.shape[-1], q.shape[-1])
    if initial_state is not None:
        state_BGVK = state_BGVK + initial_state.to(dtype).mT
    outputs = []
    tokens = zip(*(x.to(dtype).unbind(1) for x in (q, k, v, g, beta)), strict=True)
    for q_BGK, k_BGK, v_BGV, g_BGK, beta_BG in tokens:
        state_BGVK, o_BGV = delta_step(state_BGVK, q_BGK, k_BGK, v_BGV, g_BGK, beta_BG)
        outputs.append(o_BGV)
    o = torch.stack(outputs, dim=1) if outputs else torch.zeros_like(v)
    return o.to(v.dtype), state_BGVK.mT if output_final_state else None


def naive_chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor | None]:
    """`chunk_kda` of log decays, with K-first states; `chunk_size` must divide T, as fla's must."""
    if q.shape[1] % chunk_size:
        raise ValueError(f"T = {q.shape[1]} is no multiple of chunk_size {chunk_size}; pad it")
    o, final_state, *_ = chunk_kda(q, k, v, g, beta, scale, initial_state, output_final_state)
    return o, final_state
