"""kda_chunk on Triton: parallel prep, then a scan split over values and, where it pays, segments.

Without gradients only; where one is needed the plain torch chunk form runs instead
(its backward is closed-form and runs on any device), until the kernels have theirs.
Legend: T packed tokens, N sequences, H value heads, G key heads, K key, V value channels, E
checkpoints.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3_core.ops.kda_chunk.inputs import check_checkpoints, check_inputs, check_state
from k3_core.ops.varlen import host_lengths
from k3_kernels.kda_chunk import cpu as torch_chunk
from k3_kernels.kda_chunk.choose import choose_segments, choose_slabs
from k3_kernels.kda_chunk.config import (
    LOWEST_BOUND,
    PRECISIONS,
    Blocks,
    Precision,
    block_width,
    choose_blocks,
)
from k3_kernels.kda_chunk.launch import Gates, run_plan
from k3_kernels.kda_chunk.plan import make_plan
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


def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; 1 elsewhere, where kernels are only interpreted."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


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
) -> tuple[Tensor, Tensor | None]:
    """KDA over packed sequences; arguments and results as `k3_core.ops.kda_chunk.KdaChunk`.

    `precision`, `blocks`, `segment_chunks` (most chunks of a segment, 0 = never cut) and
    `num_slabs` (of the pipeline of prep and scan) replace what the tables and the planner choose.
    """
    args = (q_TGK, k_TGK, v_THV, gate_THK, beta_TH, A_log_H, dt_bias_HK)
    if needs_grad(*args, initial_state_NHVK):
        return torch_chunk.kda_chunk(
            *args,
            lower_bound=lower_bound,
            scale=scale,
            cu_seqlens_N1=cu_seqlens_N1,
            seqlens=seqlens,
            initial_state_NHVK=initial_state_NHVK,
            output_final_state=output_final_state,
            checkpoint_offsets=checkpoint_offsets,
            checkpoints_EHVK=checkpoints_EHVK,
        )
    check_inputs("kda_chunk", *args, lower_bound, is_grouped=True)
    bound = check_bound("kda_chunk", lower_bound)
    precision = precision or default_precision("kda_chunk", q_TGK.dtype)
    lengths = host_lengths(cu_seqlens_N1, seqlens, q_TGK.shape[0], "kda_chunk")
    (_, num_heads, num_v), num_k, device = v_THV.shape, q_TGK.shape[-1], q_TGK.device
    shape = (len(lengths), num_heads, num_v, num_k)
    if initial_state_NHVK is not None:
        check_state("kda_chunk", "initial_state", initial_state_NHVK, shape, q_TGK)
        initial_state_NHVK = initial_state_NHVK.contiguous()
    offsets = check_checkpoints(checkpoint_offsets, checkpoints_EHVK, lengths, shape, q_TGK)

    blocks = blocks or choose_blocks(num_k, num_v, precision)
    num_blocks = -(-num_v // min(blocks.values, block_width(num_v)))
    num_sms = num_multiprocessors(device)
    if num_slabs is None:
        num_slabs = choose_slabs(lengths, blocks.chunk, num_heads, num_sms)
    if segment_chunks is None:
        segment_chunks = choose_segments(
            lengths, blocks.chunk, num_heads, num_blocks, num_sms, num_slabs
        )
    plan = make_plan(lengths, blocks.chunk, segment_chunks, device, offsets, num_slabs)
    final = None
    if output_final_state or len(plan.slabs) > 1:
        final = torch.empty(shape, dtype=torch.float32, device=device)
    o_THV = run_plan(
        q_TGK,
        k_TGK,
        v_THV,
        Gates(gate_THK, beta_TH, A_log_H, dt_bias_HK, bound),
        num_k**-0.5 if scale is None else scale,
        plan,
        initial_state_NHVK,
        final,
        checkpoints_EHVK,
        blocks,
        precision,
    )
    return o_THV, final if output_final_state else None
