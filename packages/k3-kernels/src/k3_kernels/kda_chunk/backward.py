"""kda_chunk with gradients on Triton: what is saved, and the backward slab by slab.

Saved are the inputs as they came, o, float32 states at the starts of stretches and, while all that
stays below inputs and gradients (backward_plan.choose_saves), prep's tiles, or tiles, states and
deltas of every chunk. A slab of the backward, the last one first, makes what was not saved by prep
and the scan of the forward, then the reverse scan (backward_scan.py), then the kernel of everything
else (backward_kernel.py). Two workspaces alternate: on a GPU the reverse scan, which waits for its
own chain, runs on a second stream beside the other kernels of the slabs around it. Few heads cut
it into segments, whose maps are composed last first.

Floor at T = 8192, H = 96, K = V = 128, bf16, what has to be read and written: q, k, v, gate, dO and
four gradients, 1.8 GB, 0.43 ms; 0.4 TFLOP, 0.5 ms. With the workspace: scan 1.6 GB, reverse scan
1.9 GB, the last kernel 3.7 GB, 1.7 ms; prep 1.3 GB where its tiles are not saved. Measured on an
H200: forward 0.83 ms with tiles saved, scan 0.49 ms, reverse scan 0.76 ms, the last kernel 2.09 ms;
together 4.03 ms and 3.84 GB, or 4.51 ms and 3.48 GB with prep's 0.48 ms in place of saved tiles. At
T = 65536, H = 24: 7.9 ms with fast gates, 9.4 ms with slow ones, 8.0 GB.
Legend: T packed tokens, N sequences, H value heads, G key heads, K key, V value channels, C chunks,
E saved states.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from k3_kernels.kda_chunk.backward_config import choose_backward_blocks
from k3_kernels.kda_chunk.backward_launch import (
    Gradients,
    Workspace,
    keep_states,
    make_slab_tiles,
    make_workspace,
    run_chunks,
    run_reverse,
)
from k3_kernels.kda_chunk.backward_plan import (
    STRETCH,
    BackwardPlan,
    choose_backward_slabs,
    choose_saves,
    make_backward_plan,
)
from k3_kernels.kda_chunk.choose import REVERSE, choose_segments
from k3_kernels.kda_chunk.config import block_width
from k3_kernels.kda_chunk.forward import (
    Call,
    Inputs,
    Saves,
    num_multiprocessors,
    run_forward,
)
from k3_kernels.kda_chunk.launch import scan_stream
from k3_kernels.kda_chunk.plan import send_table
from k3_kernels.kda_chunk.workspace import (
    Kept,
    Record,
    Tiles,
    chunk_bytes,
    cut_chunks_of,
    make_kept,
    make_tiles,
)
from k3_kernels.launch import last_contiguous
from k3_kernels.once import refuse_second_derivative

NONE = (None, None)


def run_with_gradients(
    call: Call,
    inputs: Inputs,
    offsets: tuple[tuple[int, ...], ...],
    checkpoints_EHVK: Tensor | None,
) -> tuple[Tensor | None, Tensor | None]:
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
    ) -> tuple[Tensor | None, Tensor | None]:
        inputs = Inputs(*tensors)  # type: ignore[arg-type]
        plan = plan_of(call, inputs)
        # A state exported inside a chunk of the backward cuts the forward's elsewhere.
        record = None if any(offsets) else make_record(call, inputs, plan)
        o_THV, final_NHVK, saved_EHVK = forward_and_states(
            call, inputs, plan, offsets, checkpoints_EHVK, record
        )
        ctx.call = call
        ctx.set_materialize_grads(False)
        tiles, kept, _ = record or (None, None, False)
        ctx.save_for_backward(*inputs, saved_EHVK, o_THV, *(tiles or NONE), *(kept or NONE))
        return o_THV, final_NHVK

    @staticmethod
    def backward(
        ctx: Any, d_o_THV: Tensor | None, d_final_NHVK: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("kda_chunk")
        *tensors, saved_EHVK, o_THV, tile_CHX, vector_CHX, state_CHRL, delta_CHRT = (
            ctx.saved_tensors
        )
        inputs, record = Inputs(*tensors), None
        if tile_CHX is not None:
            kept = None if state_CHRL is None else Kept(state_CHRL, delta_CHRT)
            record = Record(Tiles(tile_CHX, vector_CHX), kept, False)
        grads = _backward(ctx.call, inputs, saved_EHVK, record, o_THV, d_o_THV, d_final_NHVK)
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
    device = inputs.k_TGK.device
    num_slabs, reverse_chunks = call.backward_slabs, call.reverse_chunks
    if num_slabs is None:
        num_slabs = choose_backward_slabs(lengths, blocks.chunk, num_heads)
    if reverse_chunks is None:
        width = block_width(num_v)
        own = choose_backward_blocks(inputs.k_TGK.shape[2], call.precision)
        num_blocks, num_sms = width // min(own.values, width), num_multiprocessors(device)
        reverse_chunks = choose_segments(
            lengths, blocks.chunk, num_heads, num_blocks, num_sms, num_slabs, REVERSE
        )
    stretch = call.stretch or STRETCH
    return make_backward_plan(lengths, blocks.chunk, stretch, reverse_chunks, num_slabs, device)


def make_record(call: Call, inputs: Inputs, plan: BackwardPlan) -> Record | None:
    """Room for what the forward saves of all chunks."""
    shape, num_chunks, device = inputs.state_shape, plan.num_chunks, inputs.k_TGK.device
    rest = call.blocks, call.precision
    saves = call.saves
    if saves is None:
        sizes = chunk_bytes(shape, *rest)
        saves = choose_saves(sizes, num_chunks * shape[0], plan.most_chunks * shape[0])
    if saves == Saves.NOTHING:
        return None
    has_reads = inputs.q_TGK is not None
    tiles = make_tiles(device, shape[0], shape[2], num_chunks, has_reads, *rest)
    kept = None
    if saves == Saves.TILES_AND_STATES:
        kept = make_kept(device, shape, num_chunks, *rest)
    return Record(tiles, kept, plan.has_maps)


def forward_and_states(
    call: Call,
    inputs: Inputs,
    plan: BackwardPlan,
    offsets: tuple[tuple[int, ...], ...],
    checkpoints_EHVK: Tensor | None,
    record: Record | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """o, the final state, and, unless all are kept, the states [E, H, V, K] that the plan wants."""
    device = inputs.k_TGK.device
    if record is not None and record.kept is not None:
        return *run_forward(call, inputs, (), None, record), None
    if checkpoints_EHVK is None or not any(offsets):
        num_saved = sum(map(len, plan.offsets))
        saved = torch.empty(num_saved, *inputs.state_shape, dtype=torch.float32, device=device)
        has_saved = num_saved > 0
        own = plan.offsets if has_saved else ()
        return *run_forward(call, inputs, own, saved if has_saved else None, record), saved
    merged = tuple(tuple(sorted({*a, *b})) for a, b in zip(offsets, plan.offsets, strict=True))
    numbers = {at: e for e, at in enumerate((n, t) for n, own in enumerate(merged) for t in own)}
    shape = (len(numbers), *inputs.state_shape)
    states = torch.empty(shape, dtype=torch.float32, device=device)
    results = run_forward(call, inputs, merged, states, record)

    def chosen(wanted: tuple[tuple[int, ...], ...]) -> Tensor:
        rows = [numbers[n, t] for n, own in enumerate(wanted) for t in own]
        return states[send_table(rows, 1, device)[:, 0]]

    checkpoints_EHVK.copy_(chosen(offsets))
    return *results, chosen(plan.offsets)


def _backward(
    call: Call,
    inputs: Inputs,
    saved_EHVK: Tensor | None,
    record: Record | None,
    o_THV: Tensor | None,
    d_o_THV: Tensor | None,
    d_final_NHVK: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Gradients of all inputs."""
    k, v = inputs.k_TGK, inputs.v_THV
    num_key_heads, num_heads = k.shape[1], v.shape[1]
    plan = plan_of(call, inputs)
    if o_THV is not None:
        d_o_THV = torch.zeros_like(v) if d_o_THV is None else last_contiguous(d_o_THV)
    grads = make_gradients(call, inputs, plan, d_final_NHVK)
    _run_slabs(call, inputs, plan, saved_EHVK, record, o_THV, d_o_THV, grads)
    d_q, d_k = grads.d_q_THK, grads.d_k_THK
    if num_key_heads != num_heads:
        groups = (num_key_heads, num_heads // num_key_heads)
        d_q = None if d_q is None else d_q.unflatten(1, groups).sum(2).to(k.dtype)
        d_k = d_k.unflatten(1, groups).sum(2).to(k.dtype)
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
    q, k, v, gate, beta = inputs[:5]
    _, num_heads, num_k = gate.shape
    if d_final_NHVK is None:
        shape = (len(call.lengths), *inputs.state_shape)
        d_state_NHVK = torch.zeros(shape, dtype=torch.float32, device=v.device)
    else:
        d_state_NHVK = d_final_NHVK.contiguous().clone()
    # The sum over value heads that share a key head comes before the rounding.
    dtype = k.dtype if k.shape[1] == num_heads else torch.float32
    return Gradients(
        None if q is None else torch.empty(gate.shape, dtype=dtype, device=k.device),
        torch.empty(gate.shape, dtype=dtype, device=k.device),
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
    saved_EHVK: Tensor | None,
    record: Record | None,
    o_THV: Tensor | None,
    d_o_THV: Tensor | None,
    grads: Gradients,
) -> None:
    """All slabs, the last first."""
    q, (k, v, gate) = inputs.q_TGK, (last_contiguous(x) for x in inputs[1:4])
    q = None if q is None else last_contiguous(q)
    inputs = inputs._replace(q_TGK=q, k_TGK=k, v_THV=v, gate_THK=gate)
    blocks = choose_backward_blocks(k.shape[2], call.precision)
    slabs = plan.slabs[::-1]
    spaces = make_workspaces(call, inputs, plan, record)
    is_pipeline = v.device.type == "cuda" and len(slabs) > 0
    own = torch.cuda.current_stream(v.device) if is_pipeline else None
    other = scan_stream(v.device) if is_pipeline else None
    done: list[torch.cuda.Event] = []
    for n in range(len(slabs) + 1):
        if n < len(slabs):
            part, space = slabs[n], spaces[n]
            if record is None:
                make_slab_tiles(call, inputs, part, space.tiles)
            if own is not None and other is not None:
                other.wait_event(own.record_event())
            with nullcontext() if other is None else torch.cuda.stream(other):
                run_reverse(call, part, space, d_o_THV, grads, blocks)
            if other is not None:
                done.append(other.record_event())
            if saved_EHVK is not None:
                keep_states(call, inputs, part, saved_EHVK, space)
        if n > 0:
            if own is not None:
                own.wait_event(done[n - 1])
            run_chunks(call, inputs, slabs[n - 1], spaces[n - 1], o_THV, d_o_THV, grads, blocks)


def make_workspaces(
    call: Call, inputs: Inputs, plan: BackwardPlan, record: Record | None
) -> list[Workspace]:
    """Of the slabs, the last first; two alternate, beside what was saved."""
    counts = [part.slab.num_chunks for part in plan.slabs]
    spaces = [make_workspace(call, inputs, plan.most_chunks, record) for _ in counts[:2]]
    found = [spaces[n % 2] for n in range(len(counts))]
    if record is not None:
        given = cut_chunks_of(record.tiles, counts)[::-1]
        found = [x._replace(tiles=tiles) for x, tiles in zip(found, given, strict=True)]
    if record is not None and record.kept is not None:
        states = cut_chunks_of(record.kept, counts)[::-1]
        found = [x._replace(kept=kept) for x, kept in zip(found, states, strict=True)]
    return found
