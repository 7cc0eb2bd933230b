"""kda_chunk as compiled loops, for short sequences on a CPU: token by token.

A head runs through a sequence before the next one does, so that its state stays in the cache.
Legend: T packed tokens, N sequences, H value heads, G key heads, K key, V value channels, E
checkpoints.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from torch import Tensor

from k3_core.replay import launch
from k3_kernels.kda_chunk import cpu
from k3_kernels.kda_step.token_loops import head_step
from k3_kernels.loops import DTYPES, compiled, in_dtype, is_for_one_thread, part, takes, vector
from k3_kernels.loops.packed import as_lengths, as_offsets, offsets_fit

MAX_UPDATES = 2**24
"""Tokens times numbers of their states. With more, the products of chunks are faster."""


def kda_chunk(
    q_TGK: Tensor,
    k_TGK: Tensor,
    v_THV: Tensor,
    gate_THK: Tensor,
    beta_TH: Tensor,
    A_log_H: Tensor,
    dt_bias_HK: Tensor,
    *,
    lower_bound: float | None,
    scale: float | None = None,
    cu_seqlens_N1: Tensor,
    seqlens: tuple[int, ...] | None = None,
    initial_state_NHVK: Tensor | None = None,
    output_final_state: bool = False,
    checkpoint_offsets: tuple[tuple[int, ...], ...] | None = None,
    checkpoints_EHVK: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """KDA over packed sequences; arguments and results as `k3_core.ops.kda_chunk.KdaChunk`."""
    inputs = (q_TGK, k_TGK, v_THV, gate_THK, beta_TH)
    results = None
    if lower_bound is None or -math.inf < lower_bound < 0:
        weights = in_dtype(q_TGK.dtype, A_log_H, dt_bias_HK)
        factor = q_TGK.shape[-1] ** -0.5 if scale is None else scale
        results = _run(
            inputs,
            weights,
            (cu_seqlens_N1, seqlens),
            initial_state_NHVK,
            (checkpoint_offsets, checkpoints_EHVK),
            (float(lower_bound or 0), float(factor)),
        )
    if results is None:
        # It also raises for what does not fit.
        return cpu.kda_chunk(
            *inputs,
            A_log_H,
            dt_bias_HK,
            lower_bound=lower_bound,
            scale=scale,
            cu_seqlens_N1=cu_seqlens_N1,
            seqlens=seqlens,
            initial_state_NHVK=initial_state_NHVK,
            output_final_state=output_final_state,
            checkpoint_offsets=checkpoint_offsets,
            checkpoints_EHVK=checkpoints_EHVK,
        )
    o_THV, final_NHVK = results
    return o_THV, final_NHVK if output_final_state else None


def _run(
    inputs: tuple[Tensor, ...],
    weights: tuple[Tensor, ...],
    packing: tuple[Tensor, tuple[int, ...] | None],
    state: Tensor | None,
    checkpoints: tuple[tuple[tuple[int, ...], ...] | None, Tensor | None],
    numbers: tuple[float, float],
) -> tuple[Tensor, Tensor] | None:
    """o and the final states, or None for what the loops do not take."""
    cu_N1, (offsets, kept) = as_offsets(packing[0]), checkpoints
    if cu_N1 is None or (offsets is None) is not (kept is None):
        return None
    counts = np.array([len(own) for own in offsets or ()], dtype=np.int64)
    offsets_E = np.array([t for own in offsets or () for t in own], dtype=np.int64)
    if kept is not None and (len(counts) != len(cu_N1) - 1 or not kept.is_contiguous()):
        return None
    sizes = _sizes(inputs, weights, len(cu_N1) - 1)
    if sizes is None or not takes(*inputs, *weights, state, kept):
        return None
    _, num_sequences, num_heads, _, num_k, num_v = sizes
    shape = (num_heads, num_v, num_k)
    if state is not None and state.shape != (num_sequences, *shape):
        return None
    if kept is not None and kept.shape != (len(offsets_E), *shape):
        return None
    q, k, v, gate, beta = rows = tuple(_with_rows(x) for x in inputs)
    final = v.new_empty(num_sequences, *shape) if state is None else state.clone()
    final = final.contiguous()
    if state is None:
        final.zero_()
    o = v.new_empty(v.shape)
    A_log, dt_bias = (w.contiguous() for w in weights)
    has_run = launch(
        _sequences,
        (q.data_ptr(), k.data_ptr(), v.data_ptr(), gate.data_ptr(), beta.data_ptr()),
        tuple(x.stride(0) for x in rows),
        (A_log.data_ptr(), dt_bias.data_ptr()),
        (o.data_ptr(), final.data_ptr(), 0 if kept is None else kept.data_ptr()),
        cu_N1.data_ptr(),
        as_lengths(packing[1]),
        counts,
        offsets_E,
        sizes,
        numbers,
        DTYPES[o.dtype],
    )
    return (o, final) if has_run else None


def _sizes(
    inputs: tuple[Tensor, ...], weights: tuple[Tensor, ...], num_sequences: int
) -> tuple[int, ...] | None:
    """T, N, H, G, K and V; None for more than loops take or what does not fit."""
    (q, k, v, gate, beta), (A_log, dt_bias) = inputs, weights
    if q.dim() != 3 or v.dim() != 3:
        return None
    (num_tokens, num_key_heads, num_k), (num_heads, num_v) = q.shape, v.shape[1:]
    num_updates = num_tokens * num_heads * num_k * num_v
    fits = (
        num_updates > 0
        and is_for_one_thread(num_updates, MAX_UPDATES)
        and num_key_heads > 0
        and num_heads % num_key_heads == 0
        and k.shape == q.shape
        and v.shape[0] == num_tokens
        and gate.shape == (num_tokens, num_heads, num_k)
        and beta.shape == (num_tokens, num_heads)
        and A_log.shape == (num_heads,)
        and dt_bias.shape == (num_heads, num_k)
    )
    if not fits:
        return None
    return num_tokens, num_sequences, num_heads, num_key_heads, num_k, num_v


def _with_rows(x: Tensor) -> Tensor:
    """`x`, a token of which lies without gaps."""
    _, *steps = x.stride()
    return x if steps == [*x.shape[2:], 1] else x.contiguous()


@compiled
def _sequences(
    inputs: tuple[int, ...],
    strides: tuple[int, ...],
    weights: tuple[int, ...],
    results: tuple[int, ...],
    cu: int,
    lengths_N: np.ndarray,
    counts_N: np.ndarray,
    offsets_E: np.ndarray,
    sizes: tuple[int, ...],
    numbers: tuple[float, float],
    dtype: Any,
) -> bool:
    """Addresses in, results in place; False, and nothing done, for offsets that do not fit.

    inputs: q, k, v, gate, beta, with a token's stride each. weights: A_log, dt_bias. results: o,
    final states, which hold the initial ones, checkpoints or 0. counts: a sequence's offsets, none
    without checkpoints. sizes: T, N, H, G, K, V. numbers: lower bound (0 for none), scale.
    """
    num_tokens, num_sequences, num_heads, _, num_k, num_v = sizes
    cu_N1, num_cells = vector(cu, num_sequences + 1, np.int64), num_v * num_k
    if not offsets_fit(cu_N1, lengths_N, num_tokens):
        return False
    if not _checkpoints_fit(cu_N1, counts_N, offsets_E):
        return False
    first = 0
    for n in range(num_sequences):
        count = counts_N[n] if len(counts_N) else 0
        own_E = offsets_E[first : first + count]
        for h in range(num_heads):
            state_N = part(results[1], (n * num_heads + h) * num_cells, num_cells, dtype)
            begin = cu_N1[n]
            for piece in range(count + 1):
                end = cu_N1[n] + own_E[piece] if piece < count else cu_N1[n + 1]
                _head(begin, end, h, inputs, strides, weights, results[0], sizes, numbers, state_N)
                begin = end
                if piece < count:
                    place = ((first + piece) * num_heads + h) * num_cells
                    part(results[2], place, num_cells, dtype)[:] = state_N
        first += count
    return True


@compiled
def _checkpoints_fit(cu_N1: np.ndarray, counts_N: np.ndarray, offsets_E: np.ndarray) -> bool:
    """Whether each sequence's offsets increase within its tokens, from 1 on."""
    first = 0
    for n in range(len(counts_N)):
        before = 0
        for e in range(first, first + counts_N[n]):
            if not before < offsets_E[e] <= cu_N1[n + 1] - cu_N1[n]:
                return False
            before = offsets_E[e]
        first += counts_N[n]
    return True


@compiled
def _head(
    begin: int,
    end: int,
    h: int,
    inputs: tuple[int, ...],
    strides: tuple[int, ...],
    weights: tuple[int, ...],
    o: int,
    sizes: tuple[int, ...],
    numbers: tuple[float, float],
    state_N: np.ndarray,
) -> None:
    """A head's tokens from `begin` to `end` move its state."""
    _, _, num_heads, num_key_heads, num_k, num_v = sizes
    q, k, v, gate, beta = inputs
    q_step, k_step, v_step, gate_step, beta_step = strides
    dtype, key_head = state_N.dtype, h // (num_heads // num_key_heads)
    A_log = vector(weights[0], num_heads, dtype)[h]
    bias_K = part(weights[1], h * num_k, num_k, dtype)
    q_K, k_K, v_V = np.empty(num_k, dtype), np.empty(num_k, dtype), np.empty(num_v, dtype)
    decay_K = np.empty(num_k, dtype)
    for t in range(begin, end):
        q_K[:] = part(q, t * q_step + key_head * num_k, num_k, dtype)
        k_K[:] = part(k, t * k_step + key_head * num_k, num_k, dtype)
        v_V[:] = part(v, t * v_step + h * num_v, num_v, dtype)
        head_step(
            state_N,
            q_K,
            k_K,
            v_V,
            part(gate, t * gate_step + h * num_k, num_k, dtype),
            bias_K,
            A_log,
            part(beta, t * beta_step + h, 1, dtype)[0],
            numbers[0],
            numbers[1],
            decay_K,
            part(o, (t * num_heads + h) * num_v, num_v, dtype),
        )
