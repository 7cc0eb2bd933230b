"""fla.ops.kda: chunk_kda, fused_recurrent_kda and the paged fused_recurrent_kda_fwd.

Shapes are fla's: q, k `[B, T, H, K]`, v `[B, T, HV, V]`, g `[B, T, HV, K]`, beta `[B, T, HV]`,
states `[N, HV, K, V]`, or `[N, HV, V, K]` with `state_v_first`. HV is a multiple of H.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from k3_kernels.compat.fla import kda_inputs as inputs
from k3_kernels.compat.fla.kda_paged import PagedStates, run_paged
from k3_kernels.compat.fla.kda_states import run_with_states

_UNSUPPORTED = "{} is not served; {}"


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: object | None = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    **rest: Any,
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """KDA over a batch or over sequences packed into one row, differentiable.

    o `[B, T, HV, V]` in v's dtype and the final states or None; with `return_intermediate_states`
    (without gradients only) also the states before every `chunk_size` tokens, `[B, NT, HV, K, V]`
    in q's dtype. `g` is a log decay, or a raw gate with `use_gate_in_kernel`: bounded when
    `lower_bound` is given, softplus otherwise. `safe_gate` and `disable_recompute` change how fla
    computes, and nothing here; `cp_context` and `use_graph` raise NotImplementedError. Raises
    ValueError for shapes and flags that do not fit.
    """
    is_v_first = inputs.v_first(state_v_first, rest)
    if chunk_size not in (32, 64):
        raise ValueError(f"`chunk_size` must be either 32 or 64, got {chunk_size}")
    if safe_gate and use_gate_in_kernel and not (lower_bound and -5 <= lower_bound < 0):
        raise ValueError(f"safe_gate=True needs a lower_bound in [-5, 0), got {lower_bound}")
    if cp_context is not None:
        raise NotImplementedError(_UNSUPPORTED.format("cp_context", "K3 shards in its trainer"))
    if use_graph or max_num_seqs is not None:
        advice = "without gradients K3's kernels can be captured as they are"
        raise NotImplementedError(_UNSUPPORTED.format("use_graph", advice))
    if initial_state is not None and initial_state.dtype != torch.float32:
        raise ValueError(f"initial_state is {initial_state.dtype}; convert it with .float()")
    flags = inputs.Flags(
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        lower_bound=lower_bound,
        has_l2norm=use_qk_l2norm_in_kernel,
        has_gate=use_gate_in_kernel,
        has_sigmoid=use_beta_sigmoid_in_kernel,
        has_neg_eigval=allow_neg_eigval,
    )
    inputs.check_flags(flags, A_log)
    packed, sequences = inputs.pack(q, k, v, g, beta, cu_seqlens, cu_seqlens_cpu)
    state = inputs.initial_states(packed, sequences, initial_state, is_v_first)
    if return_intermediate_states:
        o, final, chunk_states = run_with_states(
            packed, A_log, dt_bias, flags, sequences, state, chunk_size
        )
    else:
        o, final = inputs.run(packed, A_log, dt_bias, flags, sequences, state)
    final_state = inputs.final_states(final, is_v_first) if output_final_state else None
    if not return_intermediate_states:
        return o.view(v.shape), final_state
    between = inputs.final_states(chunk_states.to(q.dtype), is_v_first)
    return o.view(v.shape), final_state, between.unflatten(0, (q.shape[0], -1))


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **rest: Any,
) -> tuple[Tensor, Tensor | None]:
    """As `chunk_kda`, by the same implementations; states of any float dtype."""
    return fused_recurrent_kda_fwd(
        q,
        k,
        v,
        g,
        beta,
        A_log=A_log,
        dt_bias=dt_bias,
        initial_state=initial_state,
        scale=scale,
        output_final_state=output_final_state,
        inplace_final_state=False,
        state_v_first=inputs.v_first(state_v_first, rest),
        cu_seqlens=cu_seqlens,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        lower_bound=lower_bound,
    )


def fused_recurrent_kda_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    scale: float | None = None,
    output_final_state: bool = False,
    inplace_final_state: bool = True,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    out: Tensor | None = None,
    **rest: Any,
) -> tuple[Tensor, Tensor | None]:
    """The recurrence with states written in place and, with `ssm_state_indices`, in a pool.

    `ssm_state_indices` `[N]` or `[N, W]` are slots of `initial_state`, the pool; token w of
    sequence n leaves its state in slot [n, w] (`[N]`: the last token's in slot [n]). A sequence
    starts from slot [n, 0], or [n, num_accepted_tokens[n] - 1] after a verify step. A negative
    slot is a padded row: zeros, and no state changes. Without `inplace_final_state` the pool
    stays and the state after every token is returned.
    """
    is_v_first = inputs.v_first(state_v_first, rest)
    flags = inputs.Flags(
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        lower_bound=lower_bound,
        has_l2norm=use_qk_l2norm_in_kernel,
        has_gate=use_gate_in_kernel,
        has_sigmoid=use_beta_sigmoid_in_kernel,
        has_neg_eigval=allow_neg_eigval,
    )
    inputs.check_flags(flags, A_log)
    if inplace_final_state and initial_state is None:
        raise ValueError("inplace_final_state=True needs an initial_state to write into")
    if ssm_state_indices is not None:
        if initial_state is None:
            raise ValueError("ssm_state_indices are slots of initial_state, which is None")
        pool = PagedStates(
            initial_state, ssm_state_indices, num_accepted_tokens, is_v_first, inplace_final_state
        )
        o, final_state = run_paged(q, k, v, g, beta, A_log, dt_bias, flags, cu_seqlens, pool)
    else:
        packed, sequences = inputs.pack(q, k, v, g, beta, cu_seqlens)
        state = inputs.initial_states(packed, sequences, initial_state, is_v_first)
        o, final = inputs.run(packed, A_log, dt_bias, flags, sequences, state)
        final_state = inputs.final_states(final, is_v_first)
        if inplace_final_state and initial_state is not None:
            final_state = initial_state.copy_(final_state)
        elif not output_final_state:
            final_state = None
    o = o.view(v.shape)
    return o if out is None else out.copy_(o), final_state
