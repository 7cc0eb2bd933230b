"""moe_experts as compiled loops, for a few rows on a CPU: one expert after the other.

Packed experts are decoded where they are hit, each once a call.
T tokens, D input and N output width, I expert width, E experts, k routes a token, R = T k. A matrix
has O rows of C columns or, packed, of P = C / 2 bytes and G = C / 32 scales.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from k3_core.ops.moe_experts.reference import Activation, Norm
from k3_core.ops.moe_experts.weights import ExpertStack
from k3_core.quant import MXTensor
from k3_core.quant.mx import BLOCK
from k3_core.replay import launch
from k3_kernels.loops import DTYPES, compiled, is_for_one_thread, part, takes, vector
from k3_kernels.loops.math import products_of_rows
from k3_kernels.moe_experts import cpu
from k3_kernels.moe_experts.activation import situ_betas
from k3_kernels.moe_experts.decode import decode
from k3_kernels.rms_norm.loops import rms_norm
from k3_kernels.situ_glu.loops import situ_row

MAX_PRODUCTS = 2**26
"""Rows times the weights of a matrix. With more, or more threads, torch's matmuls pay for their
calls; 32 experts of 96 -> 64 take four times as long there at 512 tokens and twice at 2,048."""


def moe_experts(
    x_TD: Tensor,
    idx_Tk: Tensor,
    weight_Tk: Tensor,
    w1: ExpertStack,
    w3: ExpertStack,
    w2: ExpertStack,
    *,
    activation: Activation,
    norm: Norm | None = None,
    quantize_weights: bool = False,
    quantize_activations: bool = False,
) -> Tensor:
    """As the reference, for SiTU-GLU; a token's experts add up in their order."""
    out_TN = None
    is_plain = not (quantize_weights or quantize_activations)
    if is_plain and (betas := situ_betas(activation)):
        if isinstance(w1, Tensor) and isinstance(w3, Tensor) and isinstance(w2, Tensor):
            out_TN = _on_loops(x_TD, idx_Tk, weight_Tk, (w1, w3, w2), (), *betas)
        elif isinstance(w1, MXTensor) and isinstance(w3, MXTensor) and isinstance(w2, MXTensor):
            codes, scales = (w1.packed, w3.packed, w2.packed), (w1.scale, w3.scale, w2.scale)
            out_TN = _on_loops(x_TD, idx_Tk, weight_Tk, codes, scales, *betas)
    if out_TN is None:
        # It also raises for routes that do not fit.
        out_TN = cpu.moe_experts(
            x_TD,
            idx_Tk,
            weight_Tk,
            w1,
            w3,
            w2,
            activation=activation,
            quantize_weights=quantize_weights,
            quantize_activations=quantize_activations,
        )
    return out_TN if norm is None else rms_norm(out_TN, norm[0], eps=norm[1])


def _on_loops(
    x_TD: Tensor,
    idx_Tk: Tensor,
    weight_Tk: Tensor,
    stacks: tuple[Tensor, Tensor, Tensor],
    scales: tuple[Tensor, ...],
    beta: float,
    linear_beta: float | None,
) -> Tensor | None:
    """The result, or None for a call that is not for loops; plain stacks have no scales."""
    (num_experts, inner, columns), num_out = stacks[0].shape, stacks[2].shape[1]
    (num_tokens, num_routes), per_column = idx_Tk.shape, 2 if scales else 1
    width = columns * per_column
    if (
        not num_tokens * num_routes * inner * width
        or not is_for_one_thread(num_tokens * num_routes * inner * width, MAX_PRODUCTS)
        or stacks[1].shape != stacks[0].shape
        or stacks[2].shape != (num_experts, num_out, inner // per_column)
        or x_TD.shape != (num_tokens, width)
        or weight_Tk.shape != idx_Tk.shape
        or idx_Tk.dtype is not torch.int64
        or not idx_Tk.is_cpu
        or not takes(x_TD, weight_Tk, *(() if scales else stacks))
        or not all(map(_is_plain, (*stacks, *scales)))
    ):
        return None
    x_TD, idx_Tk, weight_Tk = x_TD.contiguous(), idx_Tk.contiguous(), weight_Tk.contiguous()
    out_TN = x_TD.new_empty(num_tokens, num_out)
    gate, up, down = stacks
    gate_scale, up_scale, down_scale = scales or stacks
    are_valid = launch(
        _experts,
        x_TD.data_ptr(),
        idx_Tk.data_ptr(),
        weight_Tk.data_ptr(),
        (gate.data_ptr(), up.data_ptr(), down.data_ptr()),
        (gate_scale.data_ptr(), up_scale.data_ptr(), down_scale.data_ptr()),
        bool(scales),
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


def _is_plain(tensor: Tensor) -> bool:
    """Whether it lies in a CPU's memory without gaps."""
    return tensor.is_contiguous() and tensor.is_cpu


@compiled
def _experts(
    x: int,
    idx: int,
    weight: int,
    stacks: tuple[int, int, int],
    scales: tuple[int, int, int],
    are_packed: bool,
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
    for r in range(num_rows):
        if not 0 <= idx_R[r] < num_experts:
            return False
    x_TD = vector(x, num_tokens * width, dtype).reshape(num_tokens, width)
    out_TN = vector(out, num_tokens * num_out, dtype).reshape(num_tokens, num_out)
    out_TN[:] = 0
    hits_R = np.empty(num_rows, np.int64)
    # A token may choose an expert once only, or more often: no more rows than there are.
    x_RD, y_RN = np.empty((num_rows, width), dtype), np.empty((num_rows, num_out), dtype)
    gate_RI, up_RI = np.empty((num_rows, inner), dtype), np.empty((num_rows, inner), dtype)
    hidden_RI = np.empty((num_rows, inner), dtype)
    for e in range(num_experts):
        num_hits = 0
        for r in range(num_rows):
            if idx_R[r] == e:
                hits_R[num_hits] = r
                num_hits += 1
        if num_hits == 0:
            continue
        gate_ID = _matrix(stacks[0], scales[0], are_packed, e, inner, width, dtype)
        up_ID = _matrix(stacks[1], scales[1], are_packed, e, inner, width, dtype)
        down_NI = _matrix(stacks[2], scales[2], are_packed, e, num_out, inner, dtype)
        for h in range(num_hits):
            x_RD[h] = x_TD[hits_R[h] // num_routes]
        products_of_rows(gate_ID, x_RD, num_hits, gate_RI)
        products_of_rows(up_ID, x_RD, num_hits, up_RI)
        for h in range(num_hits):
            situ_row(gate_RI[h], up_RI[h], beta, linear_beta, has_cap, hidden_RI[h])
        products_of_rows(down_NI, hidden_RI, num_hits, y_RN)
        for h in range(num_hits):
            r = hits_R[h]
            y_N, sum_N = y_RN[h], out_TN[r // num_routes]
            for n in range(num_out):
                sum_N[n] += weight_R[r] * y_N[n]
    return True


@compiled
def _matrix(
    stack: int, scales: int, is_packed: bool, expert: int, num_rows: int, width: int, dtype: Any
) -> np.ndarray:
    """The matrix [O, C] of an expert, where it lies or decoded."""
    size = num_rows * width
    if not is_packed:
        return part(stack, expert * size, size, dtype).reshape(num_rows, width)
    decoded_OC = np.empty((num_rows, width), dtype)
    codes, scale = stack + expert * size // 2, scales + expert * size // BLOCK
    decode(codes, scale, size // BLOCK, decoded_OC.ctypes.data, dtype)
    return decoded_OC
