"""kda_chunk on Triton: parallel prep, then a scan split over values and, where it pays, segments.

Where a gradient is needed, backward.py runs the same kernels and saves what its own ones need.
Legend: T packed tokens, N sequences, H value heads, G key heads, K key, V value channels, E
checkpoints.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3_core.custom_op import custom_op
from k3_core.ops.kda_chunk.inputs import check_checkpoints, check_inputs, check_state
from k3_core.ops.varlen import host_lengths
from k3_kernels.kda_chunk.backward import run_with_gradients
from k3_kernels.kda_chunk.config import (
    LOWEST_BOUND,
    PRECISIONS,
    Blocks,
    Precision,
    choose_blocks,
)
from k3_kernels.kda_chunk.forward import Call, Inputs, Saves, run_forward
from k3_kernels.launch import needs_grad


def check_bound(op: str, lower_bound: float | None) -> float:
    """The bound of the gate, if the kernels can anchor it; raises ValueError otherwise."""
    if lower_bound is None:
        raise ValueError(
            f"{op}: lower_bound None (the softplus gate) has no bound to anchor chunks "
            f"with; select {op}.cpu or {op}.reference, which compute it on any device"
        )
    if not LOWEST_BOUND <= lower_bound < 0:
        raise ValueError(
            f"{op}: lower_bound {lower_bound} is outside [{LOWEST_BOUND}, 0), beyond which scaled "
            f"keys overflow; select {op}.cpu or {op}.reference"
        )
    return lower_bound


def default_precision(op: str, dtype: torch.dtype) -> Precision:
    """The precision of an input dtype; raises TypeError for one that the kernels do not take."""
    if dtype not in PRECISIONS:
        raise TypeError(
            f"{op}: {dtype} is not supported by the kernels, allowed are "
            f"{', '.join(map(str, PRECISIONS))}; select {op}.reference for float64"
        )
    return PRECISIONS[dtype]


@custom_op("kda_chunk.triton")
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
    precision: Precision | None = None,
    blocks: Blocks | None = None,
    segment_chunks: int | None = None,
    num_slabs: int | None = None,
    backward_slabs: int | None = None,
    stretch: int | None = None,
    reverse_chunks: int | None = None,
    saves: Saves | None = None,
) -> tuple[Tensor, Tensor | None]:
    """KDA over packed sequences; arguments and results as `k3_core.ops.kda_chunk.KdaChunk`.

    `precision`, `blocks`, `segment_chunks` (most chunks of a segment, 0 = never cut) and
    `num_slabs` (of the pipeline of prep and scan) replace what the tables and the planner choose;
    so do `backward_slabs`, `stretch` (chunks between saved states), `reverse_chunks` (of a segment
    of the reverse scan) and `saves` for the backward.
    """
    args = (q_TGK, k_TGK, v_THV, gate_THK, beta_TH, A_log_H, dt_bias_HK)
    check_inputs("kda_chunk", *args, lower_bound, is_grouped=True)
    bound = check_bound("kda_chunk", lower_bound)
    precision = precision or default_precision("kda_chunk", q_TGK.dtype)
    lengths = host_lengths(cu_seqlens_N1, seqlens, q_TGK.shape[0], "kda_chunk")
    (_, num_heads, num_v), num_k = v_THV.shape, q_TGK.shape[-1]
    shape = (len(lengths), num_heads, num_v, num_k)
    if initial_state_NHVK is not None:
        check_state("kda_chunk", "initial_state", initial_state_NHVK, shape, q_TGK)
        initial_state_NHVK = initial_state_NHVK.contiguous()
    offsets = check_checkpoints(checkpoint_offsets, checkpoints_EHVK, lengths, shape, q_TGK)
    call = Call(
        lengths,
        bound,
        num_k**-0.5 if scale is None else scale,
        output_final_state,
        blocks or choose_blocks(num_k, num_v, precision),
        precision,
        segment_chunks,
        num_slabs,
        backward_slabs,
        stretch,
        reverse_chunks,
        saves,
    )
    inputs = Inputs(*args, initial_state_NHVK)
    run = run_with_gradients if needs_grad(*inputs) else run_forward
    o_THV, final_NHVK = run(call, inputs, offsets, checkpoints_EHVK)
    assert o_THV is not None  # There are queries.
    return o_THV, final_NHVK
