"""kda_chunk, token by token: the executable definition of KDA (report 1.1, architecture 3.2).

Out of place, so autograd differentiates it; float64-capable.
Legend: T packed tokens, N sequences, H value heads, G key heads, K key channels, V value channels,
E checkpoints.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3_core.custom_op import custom_op
from k3_core.ops.kda_chunk.inputs import (
    check_checkpoints,
    check_inputs,
    check_state,
    l2_normalize,
    log_decay,
    repeat_heads,
)
from k3_core.ops.math import math_dtype
from k3_core.ops.varlen import host_lengths


def delta_step(
    state_HVK: Tensor, q_HK: Tensor, k_HK: Tensor, v_HV: Tensor, g_HK: Tensor, beta_H: Tensor
) -> tuple[Tensor, Tensor]:
    """One token for any leading dims in place of H: decay, delta write, read after the write.

    q and k are normalised, g is the log decay, beta is in (0, 1). Returns the state and o [H, V].
    """
    state_HVK, o_HV, _ = recorded_step(state_HVK, q_HK, k_HK, v_HV, g_HK, beta_H)
    return state_HVK, o_HV


def recorded_step(
    state_HVK: Tensor, q_HK: Tensor, k_HK: Tensor, v_HV: Tensor, g_HK: Tensor, beta_H: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`delta_step` that returns the write u = beta (v - k^T S) [H, V] too."""
    state_HVK = state_HVK * g_HK.exp().unsqueeze(-2)
    error_HV = v_HV - (state_HVK * k_HK.unsqueeze(-2)).sum(-1)
    write_HV = beta_H.unsqueeze(-1) * error_HV
    state_HVK = state_HVK + write_HV.unsqueeze(-1) * k_HK.unsqueeze(-2)
    return state_HVK, (state_HVK * q_HK.unsqueeze(-2)).sum(-1), write_HV


@custom_op("kda_chunk.reference")
def kda_chunk(
    q_TGK: Tensor,
    k_TGK: Tensor,
    v_THV: Tensor,
    gate_THK: Tensor,
    beta_TH: Tensor,
    A_log_H: Tensor,
    dt_bias_HK: Tensor,
    *,
    lower_bound: float | None,
    scale: float | None = None,
    cu_seqlens_N1: Tensor,
    seqlens: tuple[int, ...] | None = None,
    initial_state_NHVK: Tensor | None = None,
    output_final_state: bool = False,
    checkpoint_offsets: tuple[tuple[int, ...], ...] | None = None,
    checkpoints_EHVK: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """KDA over packed sequences; arguments and results as `k3_core.ops.kda_chunk.KdaChunk`."""
    args = (q_TGK, k_TGK, v_THV, gate_THK, beta_TH, A_log_H, dt_bias_HK)
    check_inputs("kda_chunk", *args, lower_bound, is_grouped=True)
    lengths = host_lengths(cu_seqlens_N1, seqlens, q_TGK.shape[0], "kda_chunk")
    (_, num_heads, num_v), num_k = v_THV.shape, q_TGK.shape[-1]
    dtype = math_dtype(q_TGK)
    shape = (len(lengths), num_heads, num_v, num_k)
    if initial_state_NHVK is None:
        initial_state_NHVK = q_TGK.new_zeros(shape, dtype=dtype)
    check_state("kda_chunk", "initial_state", initial_state_NHVK, shape, q_TGK)
    offsets = check_checkpoints(checkpoint_offsets, checkpoints_EHVK, lengths, shape, q_TGK)

    with torch.autocast(q_TGK.device.type, enabled=False):
        q, k, v, gate, beta, A_log, dt_bias = (x.to(dtype) for x in args)
        q = l2_normalize(q) * (num_k**-0.5 if scale is None else scale)
        k = l2_normalize(k)
        q, k = repeat_heads(q, num_heads), repeat_heads(k, num_heads)
        g = log_decay(gate, A_log, dt_bias, lower_bound)
        beta = torch.sigmoid(beta)
        outputs, final_states, checkpoints, start = [], [], [], 0
        for n, length in enumerate(lengths):
            state = initial_state_NHVK[n]
            for t in range(start, start + length):
                state, o_HV = delta_step(state, q[t], k[t], v[t], g[t], beta[t])
                outputs.append(o_HV)
                if offsets and t + 1 - start in offsets[n]:
                    checkpoints.append(state.detach())
            final_states.append(state)
            start += length
    if checkpoints and checkpoints_EHVK is not None:
        with torch.no_grad():
            checkpoints_EHVK.copy_(torch.stack(checkpoints))
    o_THV = torch.stack(outputs).to(v_THV.dtype) if outputs else torch.zeros_like(v_THV)
    final_NHVK = torch.stack(final_states) if final_states else initial_state_NHVK.clone()
    return o_THV, final_NHVK if output_final_state else None
