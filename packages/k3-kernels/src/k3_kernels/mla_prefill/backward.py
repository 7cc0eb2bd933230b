"""mla_prefill with gradients: what is saved, and the launches of the backward.

Saved are q, k, v, the float32 output and log2 of the sum of exponentials of each query and head.

Legend: T queries, S keys, P padded queries, N sequences, H heads, D head dim, V value dim.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from k3_kernels.launch import dot_precision, last_contiguous
from k3_kernels.mla_prefill.backward_kernel import keys_kernel, queries_kernel
from k3_kernels.mla_prefill.backward_tiles import prepare_kernel
from k3_kernels.mla_prefill.forward import Call, run_forward, split_dim, uses_gluon
from k3_kernels.once import refuse_second_derivative

ROWS = 128
"""Each sequence of queries is padded to a multiple of these in the backward."""


class Tile(NamedTuple):
    """Queries (a divisor of ROWS) and keys of a step, warps, pipeline stages."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


KEYS = {2: Tile(64, 64, 4, 2), 4: Tile(32, 32, 4, 1)}
QUERIES = {2: Tile(128, 64, 8, 2), 4: Tile(32, 32, 4, 1)}
"""Of the kernels of keys and of queries, by the bytes of a value."""


Inputs = tuple[Tensor, Tensor, Tensor]
"""q [T, H, D], k [S, H, D], v [S, H, V]."""


class Padded(NamedTuple):
    """The gradient of the output in the operands' dtype, lse and delta, in padded tiles."""

    d_out_PHV: Tensor
    lse_HP: Tensor
    delta_HP: Tensor


def run_with_gradients(
    call: Call, q_THD: Tensor, k_SHD: Tensor, v_SHV: Tensor
) -> tuple[Tensor, Tensor | None]:
    """`run_forward` with an output of `call.out_dtype`, differentiable."""
    return _Attend.apply(call, q_THD, k_SHD, v_SHV)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: Call, q_THD: Tensor, k_SHD: Tensor, v_SHV: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        num_tokens, num_heads, _ = q_THD.shape
        shape, device = (num_tokens, num_heads, v_SHV.shape[-1]), q_THD.device
        exact_THV = torch.empty(shape, dtype=torch.float32, device=device)
        lse_HT = torch.empty(num_heads, num_tokens, dtype=torch.float32, device=device)
        largest_H = run_forward(call, q_THD, k_SHD, v_SHV, exact_THV, lse_HT)
        ctx.call = call
        ctx.set_materialize_grads(False)
        if largest_H is not None:
            ctx.mark_non_differentiable(largest_H)
        ctx.save_for_backward(q_THD, k_SHD, v_SHV, exact_THV, lse_HT)
        return exact_THV.to(call.out_dtype), largest_H

    @staticmethod
    def backward(
        ctx: Any, d_out_THV: Tensor | None, d_largest_H: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("mla_prefill")
        if d_out_THV is None:
            return None, None, None, None
        q_THD, k_SHD, v_SHV, exact_THV, lse_HT = ctx.saved_tensors
        inputs, needs = (q_THD, k_SHD, v_SHV), ctx.needs_input_grad[1:]
        return None, *gradients(ctx.call, inputs, exact_THV, lse_HT, d_out_THV, needs)


def gradients(
    call: Call,
    inputs: Inputs,
    exact_THV: Tensor,
    lse_HT: Tensor,
    d_out_THV: Tensor,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of q, k and v, None where `needs` says that they are not needed."""
    if not d_out_THV.numel():
        grads = [torch.zeros_like(x) for x in inputs]
    else:
        q_THD, k_SHD, v_SHV = inputs
        inputs = last_contiguous(q_THD), last_contiguous(k_SHD), last_contiguous(v_SHV)
        grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs]
        padded = _prepare(call, exact_THV, lse_HT, d_out_THV, q_THD.dtype)
        _run(call, inputs, padded, grads, needs)
    dq_THD, dk_SHD, dv_SHV = (x if need else None for x, need in zip(grads, needs, strict=True))
    return dq_THD, dk_SHD, dv_SHV


def _run(
    call: Call, inputs: Inputs, padded: Padded, grads: list[Tensor], needs: tuple[bool, bool, bool]
) -> None:
    """Fill the gradients that are needed."""
    needs_keys = needs[1] or needs[2]
    if needs[0] and needs_keys and uses_gluon(*inputs):
        # Its module compiles only where it runs, so only this line imports it.
        from k3_kernels.mla_prefill import gluon_backward

        gluon_backward.run(call, inputs, padded, grads, ROWS)
        return
    if needs_keys:
        _run_keys(call, inputs, padded, *grads[1:])
    if needs[0]:
        _run_queries(call, inputs, padded, grads[0])


def num_padded_tiles(num_tokens: int, num_sequences: int) -> int:
    """Tiles of ROWS queries, the most that sequences of any lengths need."""
    return num_tokens // ROWS + num_sequences


def _prepare(
    call: Call, exact_THV: Tensor, lse_HT: Tensor, d_out_THV: Tensor, dtype: torch.dtype
) -> Padded:
    num_tokens, num_heads, value_dim = exact_THV.shape
    num_sequences = call.cu_seqlens_q.numel() - 1
    num_tiles, device = num_padded_tiles(num_tokens, num_sequences), exact_THV.device
    d_out_THV = last_contiguous(d_out_THV)
    padded = Padded(
        torch.empty(num_tiles * ROWS, num_heads, value_dim, dtype=dtype, device=device),
        torch.empty(num_heads, num_tiles * ROWS, dtype=torch.float32, device=device),
        torch.empty(num_heads, num_tiles * ROWS, dtype=torch.float32, device=device),
    )
    prepare_kernel[(num_tiles * num_heads,)](
        exact_THV,
        d_out_THV,
        lse_HT,
        call.cu_seqlens_q,
        *padded,
        num_sequences,
        num_tiles,
        num_heads,
        num_tokens,
        *d_out_THV.stride()[:2],
        V=value_dim,
        VPAD=triton.next_power_of_2(value_dim),
        NPAD=triton.next_power_of_2(num_sequences),
        ROWS=ROWS,
        num_warps=8,
    )
    return padded


def _run_keys(
    call: Call,
    inputs: Inputs,
    padded: Padded,
    dk_SHD: Tensor,
    dv_SHV: Tensor,
) -> None:
    tile = KEYS[dk_SHD.element_size()]
    num_keys, num_heads, _ = dk_SHD.shape
    num_sequences = call.cu_seqlens_q.numel() - 1
    num_key_tiles = triton.cdiv(num_keys, tile.keys) + num_sequences
    keys_kernel[(num_heads * num_key_tiles,)](
        *inputs,
        *padded,
        call.cu_seqlens_q,
        call.cu_seqlens_k,
        dk_SHD,
        dv_SHV,
        num_sequences,
        padded.lse_HP.shape[1] // ROWS,
        num_key_tiles,
        num_heads,
        **_shared(call, inputs, tile),
    )


def _run_queries(call: Call, inputs: Inputs, padded: Padded, dq_THD: Tensor) -> None:
    tile = QUERIES[dq_THD.element_size()]
    num_heads, num_rows = padded.lse_HP.shape
    queries_kernel[(num_heads * (num_rows // tile.queries),)](
        *inputs,
        *padded,
        call.cu_seqlens_q,
        call.cu_seqlens_k,
        dq_THD,
        call.cu_seqlens_q.numel() - 1,
        num_rows // ROWS,
        num_heads,
        **_shared(call, inputs, tile),
    )


def _shared(call: Call, inputs: Inputs, tile: Tile) -> dict[str, Any]:
    """What both kernels take."""
    strides = ("q_stride_t", "q_stride_h", "k_stride_s", "k_stride_h", "v_stride_s", "v_stride_h")
    dim, value_dim = inputs[1].shape[-1], inputs[2].shape[-1]
    wide, rest = split_dim(dim)
    return {
        **dict(zip(strides, (s for x in inputs for s in x.stride()[:2]), strict=True)),
        "scale": call.scale,
        "log2_scale": call.scale * math.log2(math.e),
        "D": dim,
        "DA": wide,
        "DB": rest or 16,
        "V": value_dim,
        "VPAD": max(16, triton.next_power_of_2(value_dim)),
        "NPAD": triton.next_power_of_2(call.cu_seqlens_q.numel() - 1),
        "ROWS": ROWS,
        "BM": tile.queries,
        "BN": tile.keys,
        "PRECISION": dot_precision(inputs[0].dtype),
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
