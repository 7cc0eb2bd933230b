"""Checks and the input activations that all KDA ops share (report 1.1, architecture 3.2).

Legend: L leading dims (T, or B and W), H heads, K key channels, V value channels.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from k3_core.ops.math import math_dtype

L2_EPS = 1e-6
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_inputs(
    op: str,
    q_LHK: Tensor,
    k_LHK: Tensor,
    v_LHV: Tensor,
    gate_LHK: Tensor,
    beta_LH: Tensor,
    A_log_H: Tensor,
    dt_bias_HK: Tensor,
    lower_bound: float | None,
) -> None:
    """Raise ValueError or TypeError naming the first argument that does not fit the others."""
    lead_H, num_channels = tuple(q_LHK.shape[:-1]), q_LHK.shape[-1]
    expected = {
        "k": (k_LHK, (*lead_H, num_channels)),
        "v": (v_LHV, (*lead_H, v_LHV.shape[-1])),
        "gate": (gate_LHK, (*lead_H, num_channels)),
        "beta": (beta_LH, lead_H),
        "A_log": (A_log_H, lead_H[-1:]),
        "dt_bias": (dt_bias_HK, (lead_H[-1], num_channels)),
    }
    for name, (x, shape) in expected.items():
        if tuple(x.shape) != shape:
            raise ValueError(
                f"{op}: {name} has shape {list(x.shape)}, expected {list(shape)} from q/k "
                f"{list(q_LHK.shape)}; there are as many value heads as key heads"
            )
    tensors = {"q": q_LHK, **{name: x for name, (x, _) in expected.items()}}
    for name, x in tensors.items():
        if x.dtype not in _DTYPES:
            raise TypeError(
                f"{op}: {name} is {x.dtype}, allowed are {', '.join(map(str, _DTYPES))}"
            )
        if x.device != q_LHK.device:
            raise ValueError(f"{op}: {name} is on {x.device}, q/k on {q_LHK.device}")
    if not q_LHK.dtype == k_LHK.dtype == v_LHV.dtype:
        raise TypeError(
            f"{op}: q, k and v need one dtype, got {q_LHK.dtype}, {k_LHK.dtype}, {v_LHV.dtype}"
        )
    if lower_bound is not None and not (math.isfinite(lower_bound) and lower_bound < 0):
        raise ValueError(f"{op}: lower_bound is {lower_bound}; use a negative number or None")


def check_state(op: str, name: str, state: Tensor, shape: tuple[int, ...], like: Tensor) -> None:
    """Raise unless `state` has `shape` (value before key channels) and the compute dtype."""
    if tuple(state.shape) != shape:
        raise ValueError(
            f"{op}: {name} has shape {list(state.shape)}, expected {list(shape)} "
            "(heads, then value channels, then key channels)"
        )
    if state.dtype != math_dtype(like) or state.device != like.device:
        raise TypeError(
            f"{op}: {name} is {state.dtype} on {state.device}, expected {math_dtype(like)} on "
            f"{like.device}; convert it with .to()"
        )


def l2_normalize(x: Tensor) -> Tensor:
    """x / sqrt(sum x^2 + 1e-6) over the last dim."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_EPS)


def log_decay(
    gate_LHK: Tensor, A_log_H: Tensor, dt_bias_HK: Tensor, lower_bound: float | None
) -> Tensor:
    """Log decay g <= 0 per token, head and key channel, in natural log (report 1.1)."""
    z_LHK = gate_LHK + dt_bias_HK
    rate_H1 = A_log_H.exp().unsqueeze(-1)
    if lower_bound is None:
        return -rate_H1 * F.softplus(z_LHK)
    return lower_bound * torch.sigmoid(rate_H1 * z_LHK)
