"""moe_experts as compiled loops, for a few rows on a CPU: one expert after the other.

T tokens, D input and N output width, I expert width, E experts, k routes a token, R = T k.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from k3_core.ops.moe_experts.reference import Activation
from k3_core.ops.moe_experts.weights import ExpertStack
from k3_kernels.loops import DTYPES, compiled, takes, vector
from k3_kernels.loops_math import products
from k3_kernels.moe_experts import cpu
from k3_kernels.moe_experts.activation import situ_betas
from k3_kernels.situ_glu.loops import situ_row

MAX_PRODUCTS = 2**21
"""Rows times the weights of a matrix. With more, torch's matmuls pay for their calls."""


def moe_experts(
    x_TD: Tensor,
    idx_Tk: Tensor,
    weight_Tk: Tensor,
    w1: ExpertStack,
    w3: ExpertStack,
    w2: ExpertStack,
    *,
    activation: Activation,
) -> Tensor:
    """As the reference, for plain stacks and SiTU-GLU; a token's experts add up in their order."""
    out_TN = None
    betas = situ_betas(activation)
    if betas and isinstance(w1, Tensor) and isinstance(w3, Tensor) and isinstance(w2, Tensor):
        out_TN = _plain(x_TD, idx_Tk, weight_Tk, w1, w3, w2, *betas)
    if out_TN is None:
        # It also raises for routes that do not fit.
        return cpu.moe_experts(x_TD, idx_Tk, weight_Tk, w1, w3, w2, activation=activation)
    return out_TN


def _plain(
    x_TD: Tensor,
    idx_Tk: Tensor,
    weight_Tk: Tensor,
    w1_EID: Tensor,
    w3_EID: Tensor,
    w2_END: Tensor,
    beta: float,
    linear_beta: float | None,
) -> Tensor | None:
    """The result, or None for a call that is not for loops."""
    num_experts, inner, width = w1_EID.shape
    num_out = w2_END.shape[1]
    num_tokens, num_routes = idx_Tk.shape
    if (
        not 0 < num_tokens * num_routes * inner * width <= MAX_PRODUCTS
        or w3_EID.shape != w1_EID.shape
        or w2_END.shape != (num_experts, num_out, inner)
        or x_TD.shape != (num_tokens, width)
        or weight_Tk.shape != idx_Tk.shape
        or idx_Tk.dtype is not torch.int64
        or not (w1_EID.is_contiguous() and w3_EID.is_contiguous() and w2_END.is_contiguous())
        or not takes(x_TD, weight_Tk, w1_EID, w3_EID, w2_END)
    ):
        return None
    x_TD, idx_Tk, weight_Tk = x_TD.contiguous(), idx_Tk.contiguous(), weight_Tk.contiguous()
    out_TN = x_TD.new_empty(num_tokens, num_out)
    are_valid = _experts(
        x_TD.data_ptr(),
        idx_Tk.data_ptr(),
        weight_Tk.data_ptr(),
        w1_EID.data_ptr(),
        w3_EID.data_ptr(),
        w2_END.data_ptr(),
        out_TN.data_ptr(),
        num_tokens,
        num_routes,
        num_experts,
        width,
        inner,
        num_out,
        float(beta),
        float(linear_beta or 0.0),
        linear_beta is not None,
        DTYPES[x_TD.dtype],
    )
    return out_TN if are_valid else None


@compiled
def _experts(
    x: int,
    idx: int,
    weight: int,
    w1: int,
    w3: int,
    w2: int,
    out: int,
    num_tokens: int,
    num_routes: int,
    num_experts: int,
    width: int,
    inner: int,
    num_out: int,
    beta: float,
    linear_beta: float,
    has_cap: bool,
    dtype: Any,
) -> bool:
    """False for an expert that does not exist."""
    num_rows = num_tokens * num_routes
    idx_R, weight_R = vector(idx, num_rows, np.int64), vector(weight, num_rows, dtype)
    x_TD = vector(x, num_tokens * width, dtype).reshape(num_tokens, width)
    out_TN = vector(out, num_tokens * num_out, dtype).reshape(num_tokens, num_out)
    stack_shape = num_experts, inner, width
    w1_EID = vector(w1, num_experts * inner * width, dtype).reshape(stack_shape)
    w3_EID = vector(w3, num_experts * inner * width, dtype).reshape(stack_shape)
    w2_ENI = vector(w2, num_experts * num_out * inner, dtype).reshape(num_experts, num_out, inner)
    gate_I, up_I, y_N = np.empty(inner, dtype), np.empty(inner, dtype), np.empty(num_out, dtype)
    for r in range(num_rows):
        if not 0 <= idx_R[r] < num_experts:
            return False
    out_TN[:] = 0
    for expert in range(num_experts):
        for r in range(num_rows):
            if idx_R[r] == expert:
                t = r // num_routes
                products(w1_EID[expert], x_TD[t], gate_I)
                products(w3_EID[expert], x_TD[t], up_I)
                situ_row(gate_I, up_I, beta, linear_beta, has_cap, gate_I)
                products(w2_ENI[expert], gate_I, y_N)
                for n in range(num_out):
                    out_TN[t, n] += weight_R[r] * y_N[n]
    return True
