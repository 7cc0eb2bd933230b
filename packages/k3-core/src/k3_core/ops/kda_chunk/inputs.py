"""Checks and the input activations that all KDA ops share (report 1.1, architecture 3.2).

Legend: L leading dims (T, or B and W), H value heads, G key heads, K key channels, V value
channels, E checkpoints.
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
    q_LGK: Tensor,
    k_LGK: Tensor,
    v_LHV: Tensor,
    gate_LHK: Tensor,
    beta_LH: Tensor,
    A_log_H: Tensor,
    dt_bias_HK: Tensor,
    lower_bound: float | None,
    is_grouped: bool = False,
) -> None:
    """Raise ValueError or TypeError naming the first argument that does not fit the others.

    is_grouped: whether several value heads may share a key head.
    """
    lead_H, num_channels = tuple(q_LGK.shape[:-1]), q_LGK.shape[-1]
    num_key_heads, num_heads = q_LGK.shape[-2], v_LHV.shape[-2] if v_LHV.dim() > 1 else 0
    if is_grouped and num_key_heads and num_heads % num_key_heads == 0:
        lead_H = (*lead_H[:-1], num_heads)
    expected = {
        "k": (k_LGK, tuple(q_LGK.shape)),
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
                f"{list(q_LGK.shape)}; the number of value heads (v, gate, beta) is "
                f"{'a multiple' if is_grouped else 'that'} of key heads (q, k)"
            )
    tensors = {"q": q_LGK, **{name: x for name, (x, _) in expected.items()}}
    for name, x in tensors.items():
        if x.dtype not in _DTYPES:
            raise TypeError(
                f"{op}: {name} is {x.dtype}, allowed are {', '.join(map(str, _DTYPES))}"
            )
        if x.device != q_LGK.device:
            raise ValueError(f"{op}: {name} is on {x.device}, q/k on {q_LGK.device}")
    if not q_LGK.dtype == k_LGK.dtype == v_LHV.dtype:
        raise TypeError(
            f"{op}: q, k and v need one dtype, got {q_LGK.dtype}, {k_LGK.dtype}, {v_LHV.dtype}"
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


def repeat_heads(x_LGK: Tensor, num_heads: int) -> Tensor:
    """[L, H, K]: every key head for the value heads that share it."""
    group = num_heads // max(x_LGK.shape[-2], 1)
    return x_LGK if group == 1 else x_LGK.repeat_interleave(group, dim=-2)


def check_checkpoints(
    offsets: tuple[tuple[int, ...], ...] | None,
    checkpoints_EHVK: Tensor | None,
    lengths: tuple[int, ...],
    state_shape: tuple[int, ...],
    like: Tensor,
) -> tuple[tuple[int, ...], ...]:
    """The offsets, empty when there are none; raises ValueError or TypeError unless they fit."""
    if offsets is None or checkpoints_EHVK is None:
        if offsets is not None or checkpoints_EHVK is not None:
            raise ValueError("kda_chunk: give checkpoint_offsets and checkpoints together")
        return ()
    if len(offsets) != len(lengths):
        raise ValueError(
            f"kda_chunk: checkpoint_offsets has {len(offsets)} entries, one a sequence is needed: "
            f"{len(lengths)}"
        )
    for n, (own, length) in enumerate(zip(offsets, lengths, strict=True)):
        if list(own) != sorted({t for t in own if 0 < t <= length}):
            raise ValueError(
                f"kda_chunk: checkpoint_offsets {list(own)} of sequence {n} have to increase "
                f"within 1..{length}, its number of tokens"
            )
    shape = (sum(map(len, offsets)), *state_shape[1:])
    check_state("kda_chunk", "checkpoints", checkpoints_EHVK, shape, like)
    if not checkpoints_EHVK.is_contiguous():
        raise ValueError("kda_chunk: checkpoints has to be contiguous; pass a buffer of its own")
    return offsets


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
