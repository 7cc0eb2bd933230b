"""causal_conv1d and flash_kda, the packages that fla itself calls, by their own signatures.

Legend: B rows, T tokens, D channels, W taps, H heads, N sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3_kernels.compat.fla.conv import causal_conv1d
from k3_kernels.compat.fla.conv import causal_conv1d_update as update
from k3_kernels.compat.fla.kda import chunk_kda


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """y `[B, D, T]` of x `[B, D, T]` with weight `[D, W]`."""
    y, _ = causal_conv1d(x.mT, weight, bias, activation=activation)
    return y.mT


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """One new token x `[B, D]`; `conv_state` `[B, D, W]` moves on in place."""
    return update(x, conv_state, None, weight, bias, activation)[0]


@torch.no_grad()
def fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    out: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float,
    initial_state: Tensor | None = None,
    final_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> None:
    """FlashKDA's forward: raw inputs, V-first states; writes `out` and `final_state`."""
    o, state = chunk_kda(
        q,
        k,
        v,
        g,
        beta,
        scale,
        None if initial_state is None else initial_state.float(),
        final_state is not None,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        safe_gate=True,
        lower_bound=lower_bound,
        state_v_first=True,
        cu_seqlens=cu_seqlens,
        A_log=A_log,
        dt_bias=dt_bias,
    )[:2]
    out.copy_(o)
    if final_state is not None and state is not None:
        final_state.copy_(state)
