"""fused_recurrent_kda_fwd on a pool of states: decode and multi-token verify (report 1.8).

One token a sequence with raw inputs and V-first float32 states is K3's op kda_step, which reads
nothing on the host and can be captured in a CUDA graph. Everything else loops over the tokens in
torch and reads lengths and slots on the host.
Legend: N sequences, W most tokens of a sequence, L packed tokens, G value heads, K key, V value
channels, S slots, R rows of the pool in use.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from k3_core.ops.kda_chunk.inputs import repeat_heads
from k3_core.ops.kda_chunk.reference import delta_step
from k3_core.ops.math import math_dtype
from k3_kernels.compat.fla import kda_inputs as inputs
from k3_kernels.compat.fla.choose import op_for
from k3_kernels.compat.fla.gate import gate_parameters


@dataclass(frozen=True)
class PagedStates:
    """The pool `[S, G, ...]` and, per sequence, the slots of its tokens."""

    pool: Tensor
    slots: Tensor  # [N] or [N, W]
    num_accepted: Tensor | None
    is_v_first: bool
    is_inplace: bool


@torch.no_grad()
def run_paged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    flags: inputs.Flags,
    cu_seqlens: Tensor | None,
    paged: PagedStates,
) -> tuple[Tensor, Tensor]:
    """o `[L, G, V]`; the pool, or the state after each token when it is not to be written."""
    num_tokens = q.shape[0] * q.shape[1]
    is_decode = num_tokens == paged.slots.shape[0] and paged.num_accepted is None
    fits = paged.is_v_first and paged.is_inplace and paged.pool.dtype == math_dtype(q)
    if flags.is_raw and is_decode and fits:
        rows = [x.reshape(num_tokens, 1, *x.shape[2:]) for x in (q, k, v, g, beta)]
        return _decode(inputs.Packed(*rows), A_log, dt_bias, flags, paged), paged.pool
    packed, sequences = inputs.pack(q, k, v, g, beta, cu_seqlens)
    args = inputs.activate(packed, A_log, dt_bias, flags)
    return _by_token(args, sequences.seqlens, flags.scale, paged)


def _decode(
    rows: inputs.Packed,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    flags: inputs.Flags,
    paged: PagedStates,
) -> Tensor:
    q_N1HK, k_N1HK, v_N1GV, g_N1GK, beta_N1G = rows
    q_N1GK, k_N1GK = (repeat_heads(x, v_N1GV.shape[2]) for x in (q_N1HK, k_N1HK))
    slots_N = paged.slots if paged.slots.dim() == 1 else paged.slots[:, 0]
    o_N1GV: Tensor = op_for("kda_step", q_N1GK)(
        q_N1GK,
        k_N1GK,
        v_N1GV,
        g_N1GK,
        beta_N1G,
        *gate_parameters(g_N1GK, A_log, dt_bias),
        state_SHVK=paged.pool,
        slots_B=slots_N,
        lower_bound=flags.lower_bound,
        scale=flags.scale,
    )
    return o_N1GV.squeeze(1)


def _by_token(
    args: tuple[Tensor, ...], seqlens: tuple[int, ...], scale: float, paged: PagedStates
) -> tuple[Tensor, Tensor]:
    """Token w of every sequence that has one, then w + 1."""
    q, k, v, g, beta = args
    pool, device, dtype = paged.pool, q.device, math_dtype(q)
    slots = [s if isinstance(s, list) else [s] * max(1, n) for s, n in _slots(paged, seqlens)]
    accepted = [1] * len(slots) if paged.num_accepted is None else paged.num_accepted.tolist()
    begins = [row[count - 1] for row, count in zip(slots, accepted, strict=True)]
    starts = [sum(seqlens[:n]) for n in range(len(seqlens))]
    rows = [n for n, slot in enumerate(begins) if slot >= 0]
    state_RGVK = pool[[begins[n] for n in rows]].to(dtype)
    state_RGVK = state_RGVK if paged.is_v_first else state_RGVK.mT.contiguous()
    o_LGV = torch.zeros_like(v)
    after = None if paged.is_inplace else pool.new_zeros(len(v), *pool.shape[1:])
    for w in range(max((seqlens[n] for n in rows), default=0)):
        live = [r for r, n in enumerate(rows) if seqlens[n] > w]
        tokens = torch.tensor([starts[rows[r]] + w for r in live], device=device)
        token_args = (x[tokens].to(dtype) for x in (q * scale, k, v, g, beta))
        state, o = delta_step(state_RGVK[live], *token_args)
        state_RGVK[live], o_LGV[tokens] = state, o.to(v.dtype)
        kept = (state if paged.is_v_first else state.mT).to(pool.dtype)
        if after is not None:
            after[tokens] = kept
            continue
        targets = [slots[rows[r]][w] for r in live]
        written = [i for i, slot in enumerate(targets) if slot >= 0]
        pool[[targets[i] for i in written]] = kept[written]
    return o_LGV, pool if after is None else after


def _slots(paged: PagedStates, seqlens: tuple[int, ...]) -> Iterator[tuple[int | list[int], int]]:
    """The slots of each sequence with its length; raises ValueError when they do not fit."""
    slots = paged.slots.tolist()
    width = paged.slots.shape[1] if paged.slots.dim() == 2 else max(seqlens, default=0)
    if len(slots) != len(seqlens) or max(seqlens, default=0) > width:
        raise ValueError(
            f"ssm_state_indices {list(paged.slots.shape)} do not fit {len(seqlens)} sequences of "
            f"up to {max(seqlens, default=0)} tokens; pass [N] or [N, W]"
        )
    return zip(slots, seqlens, strict=True)
