"""kda_chunk with gradients on Triton: what is saved, and the backward slab by slab.

Saved are the inputs as they came, o, and float32 states at the starts of stretches. A slab of the
backward, the last one first, runs prep and the scan of the forward again, now keeping the state and
the deltas of every chunk, then the reverse scan (backward_scan.py), then the kernel of everything
else (backward_kernel.py). Two workspaces alternate: on a GPU the reverse scan, which waits for its
own chain, runs on a second stream beside the other kernels of the slabs around it.

Floor at T = 8192, H = 96, K = V = 128, bf16, what has to be read and written: q, k, v, gate, dO and
four gradients, 1.8 GB, 0.43 ms; 0.4 TFLOP, 0.5 ms. With the workspace: prep 1.3 GB, scan 1.6 GB,
reverse scan 1.9 GB, the last kernel 3.4 GB, 1.95 ms. Measured on an H200: recompute 1.01 ms,
reverse scan 0.74 ms, forward 0.78 ms; the last kernel took 2.58 ms before it was cut into blocks of
channels and took the norms' part from o.
A reverse scan of few heads could be cut into segments as the forward is (the composition of their
maps transposed); until it is, a slab's pieces are whole, and few heads take smaller blocks of V.
Legend: T packed tokens, N sequences, H value heads, G key heads, K key, V value channels, C chunks,
E saved states.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from k3_kernels.kda_chunk.backward_config import (
    BackwardBlocks,
    choose_backward_blocks,
    reverse_values,
)
from k3_kernels.kda_chunk.backward_kernel import chunk_backward_kernel
from k3_kernels.kda_chunk.backward_plan import (
    BackwardPlan,
    ReverseSlab,
    choose_backward_slabs,
    choose_stretch,
    make_backward_plan,
)
from k3_kernels.kda_chunk.backward_scan import reverse_kernel
from k3_kernels.kda_chunk.config import block_width
from k3_kernels.kda_chunk.forward import Call, Inputs, run_forward
from k3_kernels.kda_chunk.launch import (
    TRITON,
    Gates,
    Kept,
    Tiles,
    make_tiles,
    run_pieces,
    run_prep,
    scan_stream,
)
from k3_kernels.kda_chunk.plan import send_table
from k3_kernels.launch import last_contiguous
from k3_kernels.once import refuse_second_derivative


class Workspace(NamedTuple):
    """Of a slab; kept and d_state: of every chunk and head."""

    tiles: Tiles
    kept: Kept
    d_state_CHVK: Tensor


class Gradients(NamedTuple):
    """Results by value head; sums: of dz and dz z over the tokens of each chunk (gates)."""

    d_q_THK: Tensor
    d_k_THK: Tensor
    d_v_THV: Tensor
    d_gate_THK: Tensor
    d_beta_TH: Tensor
    sum_CH2K: Tensor
    d_state_NHVK: Tensor


def run_with_gradients(
    call: Call,
    inputs: Inputs,
    offsets: tuple[tuple[int, ...], ...],
    checkpoints_EHVK: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """`run_forward`, differentiable."""
    return _KdaChunk.apply(call, offsets, checkpoints_EHVK, *inputs)


class _KdaChunk(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        offsets: tuple[tuple[int, ...], ...],
        checkpoints_EHVK: Tensor | None,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        inputs = Inputs(*tensors)  # type: ignore[arg-type]
        plan = plan_of(call, inputs)
        o_THV, final_NHVK, saved_EHVK = forward_and_states(
            call, inputs, plan, offsets, checkpoints_EHVK
        )
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, saved_EHVK, o_THV)
        return o_THV, final_NHVK

    @staticmethod
    def backward(
        ctx: Any, d_o_THV: Tensor | None, d_final_NHVK: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("kda_chunk")
        *tensors, saved_EHVK, o_THV = ctx.saved_tensors
        inputs = Inputs(*tensors)
        grads = _backward(ctx.call, inputs, saved_EHVK, o_THV, d_o_THV, d_final_NHVK)
        needs = ctx.needs_input_grad[3:]
        return (
            None,
            None,
            None,
            *(x if need else None for x, need in zip(grads, needs, strict=True)),
        )


def plan_of(call: Call, inputs: Inputs) -> BackwardPlan:
    """Cuts of the backward, which the forward has to know for the states that it saves."""
    num_heads, num_v = inputs.v_THV.shape[1:]
    blocks, lengths = call.blocks, call.lengths
    num_slabs = call.backward_slabs
    if num_slabs is None:
        num_slabs = choose_backward_slabs(lengths, blocks.chunk, num_heads)
    stretch = call.stretch
    if stretch is None:
        num_blocks = block_width(num_v) // min(blocks.values, block_width(num_v))
        stretch = choose_stretch(lengths, blocks.chunk, num_heads, num_blocks, num_slabs)
    return make_backward_plan(lengths, blocks.chunk, stretch, num_slabs, inputs.q_TGK.device)


def forward_and_states(
    call: Call,
    inputs: Inputs,
    plan: BackwardPlan,
    offsets: tuple[tuple[int, ...], ...],
    checkpoints_EHVK: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """o, the final state, and the states [E, H, V, K] that the plan asks for."""
    device = inputs.q_TGK.device
    if checkpoints_EHVK is None:
        num_saved = sum(map(len, plan.offsets))
        saved = torch.empty(num_saved, *inputs.state_shape, dtype=torch.float32, device=device)
        has_saved = num_saved > 0
        own = plan.offsets if has_saved else ()
        return *run_forward(call, inputs, own, saved if has_saved else None), saved
    merged = tuple(tuple(sorted({*a, *b})) for a, b in zip(offsets, plan.offsets, strict=True))
    numbers = {at: e for e, at in enumerate((n, t) for n, own in enumerate(merged) for t in own)}
    shape = (len(numbers), *inputs.state_shape)
    states = torch.empty(shape, dtype=torch.float32, device=device)
    results = run_forward(call, inputs, merged, states)

    def chosen(wanted: tuple[tuple[int, ...], ...]) -> Tensor:
        rows = [numbers[n, t] for n, own in enumerate(wanted) for t in own]
        return states[send_table(rows, 1, device)[:, 0]]

    checkpoints_EHVK.copy_(chosen(offsets))
    return *results, chosen(plan.offsets)


def _backward(
    call: Call,
    inputs: Inputs,
    saved_EHVK: Tensor,
    o_THV: Tensor,
    d_o_THV: Tensor | None,
    d_final_NHVK: Tensor | None,
) -> tuple[Tensor, ...]:
    """Gradients of all inputs."""
    q, v = inputs.q_TGK, inputs.v_THV
    num_key_heads, num_heads = q.shape[1], v.shape[1]
    plan = plan_of(call, inputs)
    d_o_THV = torch.zeros_like(v) if d_o_THV is None else last_contiguous(d_o_THV)
    grads = make_gradients(call, inputs, plan, d_final_NHVK)
    _run_slabs(call, inputs, plan, saved_EHVK, o_THV, d_o_THV, grads)
    d_q, d_k = grads[:2]
    if num_key_heads != num_heads:
        groups = (num_key_heads, num_heads // num_key_heads)
        d_q, d_k = (x.unflatten(1, groups).sum(2).to(q.dtype) for x in (d_q, d_k))
    sum_H2K = grads.sum_CH2K.sum(0)
    return (
        d_q,
        d_k,
        *grads[2:5],
        sum_H2K[:, 1].sum(1).to(inputs.A_log_H.dtype),
        sum_H2K[:, 0].to(inputs.dt_bias_HK.dtype),
        grads.d_state_NHVK,
    )


def make_gradients(
    call: Call, inputs: Inputs, plan: BackwardPlan, d_final_NHVK: Tensor | None
) -> Gradients:
    """Room for the results; that of the state begins with the final state's."""
    q, v, gate, beta = inputs[0], inputs[2], inputs[3], inputs[4]
    _, num_heads, num_k = gate.shape
    if d_final_NHVK is None:
        shape = (len(call.lengths), *inputs.state_shape)
        d_state_NHVK = torch.zeros(shape, dtype=torch.float32, device=v.device)
    else:
        d_state_NHVK = d_final_NHVK.contiguous().clone()
    # The sum over value heads that share a key head comes before the rounding.
    dtype = q.dtype if q.shape[1] == num_heads else torch.float32
    d_q_THK, d_k_THK = (torch.empty(gate.shape, dtype=dtype, device=q.device) for _ in range(2))
    return Gradients(
        d_q_THK,
        d_k_THK,
        torch.empty_like(v, memory_format=torch.contiguous_format),
        torch.empty_like(gate, memory_format=torch.contiguous_format),
        torch.empty_like(beta, memory_format=torch.contiguous_format),
        gate.new_empty(plan.num_chunks, num_heads, 2, num_k, dtype=torch.float32),
        d_state_NHVK,
    )


def _run_slabs(
    call: Call,
    inputs: Inputs,
    plan: BackwardPlan,
    saved_EHVK: Tensor,
    o_THV: Tensor,
    d_o_THV: Tensor,
    grads: Gradients,
) -> None:
    """All slabs, the last first."""
    q, k, v, gate = (last_contiguous(x) for x in inputs[:4])
    inputs = inputs._replace(q_TGK=q, k_TGK=k, v_THV=v, gate_THK=gate)
    blocks = choose_backward_blocks(q.shape[2], v.shape[2], call.precision)
    slabs = plan.slabs[::-1]
    spaces = [make_workspace(call, inputs, plan.most_chunks) for _ in slabs[:2]]
    is_pipeline = v.device.type == "cuda" and len(slabs) > 1
    own = torch.cuda.current_stream(v.device) if is_pipeline else None
    other = scan_stream(v.device) if is_pipeline else None
    done: list[torch.cuda.Event] = []
    for n in range(len(slabs) + 1):
        if n < len(slabs):
            recompute(call, inputs, slabs[n], saved_EHVK, spaces[n % 2])
            if own is not None and other is not None:
                other.wait_event(own.record_event())
            with nullcontext() if other is None else torch.cuda.stream(other):
                run_reverse(call, slabs[n], spaces[n % 2], d_o_THV, grads, blocks)
            if other is not None:
                done.append(other.record_event())
        if n > 0:
            if own is not None:
                own.wait_event(done[n - 1])
            part, space = slabs[n - 1], spaces[(n - 1) % 2]
            run_chunks(call, inputs, part, space, o_THV, d_o_THV, grads, blocks)


def make_workspace(call: Call, inputs: Inputs, num_chunks: int) -> Workspace:
    """Room for the largest slab."""
    device, operand = inputs.v_THV.device, call.precision.operand
    num_heads, num_v, num_k = inputs.state_shape
    lead, rows, width = (num_chunks, num_heads), block_width(num_v), block_width(num_k)
    tiles = make_tiles(device, num_heads, num_k, num_chunks, True, call.blocks, call.precision)
    state, d_state = (
        torch.empty(*lead, rows, width, dtype=operand, device=device) for _ in range(2)
    )
    delta = torch.empty(*lead, rows, call.blocks.chunk, dtype=operand, device=device)
    return Workspace(tiles, Kept(state, delta), d_state)


def recompute(
    call: Call, inputs: Inputs, part: ReverseSlab, saved_EHVK: Tensor, space: Workspace
) -> None:
    """Tiles, states and deltas of the chunks of a slab."""
    gates = Gates(*inputs[3:7], call.lower_bound)
    tiles, blocks, precision = space.tiles, call.blocks, call.precision
    run_prep(inputs.q_TGK, inputs.k_TGK, gates, call.scale, part.slab, tiles, blocks, precision)
    run_pieces(
        inputs.v_THV,
        None,
        tiles,
        part.slab,
        part.stretches,
        inputs.initial_NHVK,
        saved_EHVK,
        None,
        None,
        saved_EHVK.shape[0] > 0,
        inputs.q_TGK.shape[2],
        blocks,
        precision,
        space.kept,
    )


def run_reverse(
    call: Call,
    part: ReverseSlab,
    space: Workspace,
    d_o_THV: Tensor,
    grads: Gradients,
    blocks: BackwardBlocks,
) -> None:
    """Gradients of v and of the states at the middles of chunks; d_state goes back by the slab."""
    num_heads, num_v, num_k = grads.d_state_NHVK.shape[1:]
    pieces, width = part.slab.pieces, block_width(num_v)
    if pieces.count == 0 or num_heads == 0:
        return
    values = reverse_values(blocks, width, pieces.count * num_heads)
    reverse_kernel[(pieces.count * num_heads * (width // values),)](
        d_o_THV,
        grads.d_v_THV,
        *space.tiles,
        pieces.table,
        grads.d_state_NHVK,
        space.d_state_CHVK,
        num_heads,
        *d_o_THV.stride()[:2],
        *grads.d_v_THV.stride()[:2],
        K=num_k,
        V=num_v,
        BK=block_width(num_k),
        BV=values,
        BT=call.blocks.chunk,
        TILES=space.tiles.tile_CHX.shape[2],
        VECTORS=space.tiles.vector_CHX.shape[2],
        STAGES=blocks.stages,
        NUM_BLOCKS=width // values,
        OPERAND=TRITON[call.precision.operand],
        PRECISION=call.precision.dot,
        num_warps=blocks.warps,
    )


def run_chunks(
    call: Call,
    inputs: Inputs,
    part: ReverseSlab,
    space: Workspace,
    o_THV: Tensor,
    d_o_THV: Tensor,
    grads: Gradients,
    blocks: BackwardBlocks,
) -> None:
    """The other gradients of the chunks of a slab."""
    q, k, v, gate, beta, A_log_H, dt_bias_HK, _ = inputs
    num_heads, num_v, num_k = grads.d_state_NHVK.shape[1:]
    slab, precision = part.slab, call.precision
    if slab.num_chunks == 0 or num_heads == 0:
        return
    width, key_width = block_width(num_v), block_width(num_k)
    channels = min(blocks.channels, key_width)
    chunk_backward_kernel[(slab.num_chunks * num_heads * (key_width // channels),)](
        q,
        k,
        gate,
        beta,
        A_log_H.contiguous(),
        dt_bias_HK.contiguous(),
        v,
        o_THV,
        d_o_THV,
        grads.d_v_THV,
        slab.chunks,
        space.tiles.vector_CHX,
        *space.kept,
        space.d_state_CHVK,
        grads.d_q_THK,
        grads.d_k_THK,
        grads.d_gate_THK,
        grads.d_beta_TH,
        grads.sum_CH2K[part.first_chunk :],
        num_heads,
        width,
        call.lower_bound,
        1.0 / call.scale if call.scale else 0.0,
        *(s for x in (q, k, gate, beta, v, d_o_THV) for s in x.stride()[:2]),
        GROUP=num_heads // q.shape[1],
        K=num_k,
        V=num_v,
        BK=key_width,
        BV=min(blocks.chunk_values, width),
        BC=channels,
        BT=call.blocks.chunk,
        VECTORS=space.tiles.vector_CHX.shape[2],
        STAGES=blocks.chunk_stages,
        OPERAND=TRITON[precision.operand],
        SUMS=TRITON[precision.sums],
        PRECISION=precision.dot,
        SUM_PRECISION=precision.map_dot if precision.sums == torch.float32 else precision.dot,
        num_warps=blocks.chunk_warps,
        num_stages=1,
        maxnreg=blocks.chunk_registers,
    )
