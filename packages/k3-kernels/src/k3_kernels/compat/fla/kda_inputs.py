"""fla's KDA arguments turned into those of K3's ops: packing, heads, activations, state layout.

Legend: B batch rows, T tokens, H key heads, G value heads (a multiple of H), K key, V value
channels, N sequences, L packed tokens, E checkpoints.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from k3_core.ops.kda_chunk.inputs import repeat_heads
from k3_core.ops.math import math_dtype
from k3_core.ops.varlen import host_lengths
from k3_kernels.compat.fla.choose import op_for
from k3_kernels.compat.fla.gate import fused_kda_gate, gate_parameters
from k3_kernels.compat.fla.l2norm import l2norm
from k3_kernels.kda_chunk.config import LOWEST_BOUND
from k3_kernels.kda_chunk.cpu import kda_chunk_activated
from k3_kernels.kda_chunk.cpu_checkpoints import run_with_checkpoints


@dataclass(frozen=True)
class Flags:
    """What is left to do inside the call, and its constants."""

    scale: float
    lower_bound: float | None
    has_l2norm: bool
    has_gate: bool
    has_sigmoid: bool
    has_neg_eigval: bool

    @property
    def is_raw(self) -> bool:
        """Whether the inputs are those of K3's ops, with a gate that every kernel computes."""
        is_bounded = self.lower_bound is not None and LOWEST_BOUND <= self.lower_bound < 0
        has_all = self.has_l2norm and self.has_gate and self.has_sigmoid
        return has_all and is_bounded and not self.has_neg_eigval


class Packed(NamedTuple):
    """Inputs without a batch dimension; q and k still have H heads."""

    q_LHK: Tensor
    k_LHK: Tensor
    v_LGV: Tensor
    g_LGK: Tensor
    beta_LG: Tensor


class Sequences(NamedTuple):
    """The lengths on both sides; the final states belong to them in order."""

    seqlens: tuple[int, ...]
    cu_seqlens_N1: Tensor


def check_flags(flags: Flags, A_log: Tensor | None) -> None:
    """Raise ValueError for flags that contradict each other."""
    if flags.has_neg_eigval and not flags.has_sigmoid:
        raise ValueError(
            "allow_neg_eigval=True needs use_beta_sigmoid_in_kernel=True; a beta that is given "
            "after the sigmoid can be doubled before the call"
        )
    if flags.has_gate and A_log is None and flags.lower_bound is None:
        raise ValueError("use_gate_in_kernel=True needs A_log, lower_bound or both")


def v_first(state_v_first: bool, rest: dict[str, Any]) -> bool:
    """The state layout, also by its old name; raises for both names and for unknown arguments."""
    old = rest.pop("transpose_state_layout", None)
    if rest:
        raise TypeError(f"unknown arguments {', '.join(sorted(rest))}; see fla-core 0.6.0's")
    if old is None:
        return state_v_first
    if state_v_first:
        raise ValueError("state_v_first and transpose_state_layout name one thing; give the first")
    warnings.warn(
        "transpose_state_layout is fla's old name of state_v_first",
        DeprecationWarning,
        stacklevel=3,
    )
    return bool(old)


def pack(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Packed, Sequences]:
    """Checked inputs without the batch dimension; rows are sequences unless cu_seqlens says more.

    Raises ValueError naming the first argument whose shape does not fit.
    """
    num_rows, num_tokens, num_heads, num_k = q.shape
    num_values = v.shape[2]
    lead = (num_rows, num_tokens)
    if num_values % num_heads:
        raise ValueError(f"v has {num_values} heads, which q's {num_heads} do not divide")
    expected = {
        "k": (k, (*lead, num_heads, num_k)),
        "v": (v, (*lead, num_values, v.shape[-1])),
        "g": (g, (*lead, num_values, num_k)),
        "beta": (beta, (*lead, num_values)),
    }
    for name, (x, shape) in expected.items():
        if tuple(x.shape) != shape:
            raise ValueError(
                f"{name} has shape {list(x.shape)}, expected {list(shape)} beside q "
                f"{list(q.shape)} and v {list(v.shape)}"
            )
    if cu_seqlens is None:
        seqlens = (num_tokens,) * num_rows
        offsets = torch.arange(num_rows + 1, device=q.device) * num_tokens
    elif num_rows != 1:
        raise ValueError(f"cu_seqlens packs sequences into one row, q has {num_rows}; flatten it")
    else:
        host = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
        seqlens = host_lengths(host, None, num_tokens, "fla's kda")
        offsets = cu_seqlens
    packed = Packed(*(x.flatten(0, 1) for x in (q, k, v, g, beta)))
    return packed, Sequences(seqlens, offsets)


def initial_states(
    packed: Packed, sequences: Sequences, state: Tensor | None, is_v_first: bool
) -> Tensor:
    """[N, G, V, K] in the math dtype; zeros where there is none. Raises ValueError on a misfit."""
    num_heads, num_v = packed.v_LGV.shape[1:]
    num_k, dtype = packed.q_LHK.shape[-1], math_dtype(packed.q_LHK)
    shape = (len(sequences.seqlens), num_heads, num_v, num_k)
    if state is None:
        return packed.q_LHK.new_zeros(shape, dtype=dtype)
    state_NGVK = state if is_v_first else state.transpose(-1, -2)
    if tuple(state_NGVK.shape) != shape:
        layout = "[N, HV, V, K]" if is_v_first else "[N, HV, K, V]"
        raise ValueError(
            f"initial_state has shape {list(state.shape)}; {layout} is expected for "
            f"{shape[0]} sequences, {num_heads} heads, K = {num_k} and V = {num_v}"
        )
    return state_NGVK.to(dtype)


def final_states(state_NGVK: Tensor, is_v_first: bool) -> Tensor:
    """fla's layout."""
    return state_NGVK if is_v_first else state_NGVK.transpose(-1, -2).contiguous()


def run(
    packed: Packed,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    flags: Flags,
    sequences: Sequences,
    state_NGVK: Tensor,
    offsets: tuple[tuple[int, ...], ...] | None = None,
    checkpoints_EGVK: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """o `[L, G, V]` and the final states `[N, G, V, K]`; checkpoints as op kda_chunk's."""
    if flags.is_raw:
        o_LGV, final_NGVK = op_for("kda_chunk", packed.q_LHK)(
            *packed,
            *gate_parameters(packed.g_LGK, A_log, dt_bias),
            lower_bound=flags.lower_bound,
            scale=flags.scale,
            cu_seqlens_N1=sequences.cu_seqlens_N1,
            seqlens=sequences.seqlens,
            initial_state_NHVK=state_NGVK,
            output_final_state=True,
            checkpoint_offsets=offsets,
            checkpoints_EHVK=checkpoints_EGVK,
        )
        return o_LGV, final_NGVK
    inputs = activate(packed, A_log, dt_bias, flags)

    def run_activated(
        tensors: Sequence[Tensor], lengths: Sequence[int], state: Tensor
    ) -> list[Tensor]:
        results = kda_chunk_activated(
            *tensors,
            lower_bound=flags.lower_bound if flags.has_gate else None,
            scale=flags.scale,
            seqlens=tuple(lengths),
            initial_state_NHVK=state,
        )
        return list(results)

    if offsets is None or checkpoints_EGVK is None:
        o_LGV, final_NGVK = run_activated(inputs, sequences.seqlens, state_NGVK)
        return o_LGV, final_NGVK
    return run_with_checkpoints(
        run_activated, inputs, sequences.seqlens, state_NGVK, offsets, checkpoints_EGVK
    )


def activate(
    packed: Packed, A_log: Tensor | None, dt_bias: Tensor | None, flags: Flags
) -> tuple[Tensor, ...]:
    """q, k, v, log decay and beta with G heads, what `flags` leaves to do done in torch."""
    q, k, v, g, beta = packed
    dtype = math_dtype(q)
    if flags.has_l2norm:
        q, k = (l2norm(x, output_dtype=dtype) for x in (q, k))
    if flags.has_gate:
        g = fused_kda_gate(g, A_log, dt_bias, flags.lower_bound, output_dtype=dtype)
    if flags.has_sigmoid:
        beta = torch.sigmoid(beta.to(dtype)) * (2 if flags.has_neg_eigval else 1)
    num_heads = v.shape[1]
    return repeat_heads(q, num_heads), repeat_heads(k, num_heads), v, g, beta
