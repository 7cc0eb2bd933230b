"""fla.ops.kda.gate: the log decay from a raw gate (report 1.1), differentiable on any device.

Legend: leading dims ..., H heads, K key channels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from k3_core.ops.kda_chunk.inputs import log_decay
from k3_core.ops.math import math_dtype


def gate_parameters(
    g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """A_log `[H]` and dt_bias `[H, K]` in the math dtype; zeros where fla leaves them out."""
    shape, dtype = g.shape[-2:], math_dtype(g)
    zeros = g.new_zeros(shape, dtype=dtype)
    A_log_H = zeros[:, 0] if A_log is None else A_log.reshape(shape[0]).to(dtype)
    dt_bias_HK = zeros if dt_bias is None else dt_bias.reshape(shape).to(dtype)
    return A_log_H, dt_bias_HK


def fused_kda_gate(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """lower_bound sigmoid(e^A_log (g + dt_bias)), or -e^A_log softplus(g + dt_bias) without it.

    `g` is `[..., H, K]`, A_log has H elements, dt_bias H * K. Without A_log the factor is 1, which
    only the bounded gate has: ValueError otherwise.
    """
    if A_log is None and lower_bound is None:
        raise ValueError("A_log is None, which needs a lower_bound; pass one, for example -5.0")
    A_log_H, dt_bias_HK = gate_parameters(g, A_log, dt_bias)
    exact = g.to(math_dtype(g))
    if lower_bound is None:
        return log_decay(exact, A_log_H, dt_bias_HK, None).to(output_dtype)
    # Not sigmoid(x): its gradient s (1 - s) is rounded away where the gate saturates.
    z = A_log_H.exp().unsqueeze(-1) * (exact + dt_bias_HK)
    return (lower_bound * F.logsigmoid(z).exp()).to(output_dtype)


def naive_kda_gate(
    g: Tensor,
    A_log: Tensor,
    dt_bias: Tensor | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The unbounded gate, computed in float64: what the other ways of computing it are held to."""
    A_log_H, dt_bias_HK = gate_parameters(g.double(), A_log, dt_bias)
    return log_decay(g.double(), A_log_H, dt_bias_HK, None).to(output_dtype)


def naive_kda_lowerbound_gate(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float = -5.0,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The bounded gate, computed in float64: what the other ways of computing it are held to."""
    A_log_H, dt_bias_HK = gate_parameters(g.double(), A_log, dt_bias)
    return log_decay(g.double(), A_log_H, dt_bias_HK, lower_bound).to(output_dtype)
