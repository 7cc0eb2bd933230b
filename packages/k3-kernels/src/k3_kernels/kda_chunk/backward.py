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
from typing import Any

import torch
from torch import Tensor

from k3_kernels.kda_chunk.backward_config import choose_backward_blocks
from k3_kernels.kda_chunk.backward_launch import (
    Gradients,
    keep_states,
    make_slab_tiles,
    make_workspace,
    run_chunks,
    run_reverse,
)
from k3_kernels.kda_chunk.backward_plan import (
    KEPT_BYTES,
    STRETCH,
    BackwardPlan,
    choose_backward_slabs,
    make_backward_plan,
)
from k3_kernels.kda_chunk.choose import REVERSE, choose_segments
from k3_kernels.kda_chunk.config import block_width
from k3_kernels.kda_chunk.forward import Call, Inputs, num_multiprocessors, run_forward
from k3_kernels.kda_chunk.launch import (
    KeptTiles,
    Tiles,
    cut_tiles,
    make_tiles,
    scan_stream,
    tile_sizes,
)
from k3_kernels.kda_chunk.plan import send_table
from k3_kernels.launch import last_contiguous
from k3_kernels.once import refuse_second_derivative


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
        # A state exported inside a chunk of the backward cuts the forward's elsewhere.
        kept = None if any(offsets) else room_for_tiles(call, inputs, plan)
        o_THV, final_NHVK, saved_EHVK = forward_and_states(
            call, inputs, plan, offsets, checkpoints_EHVK, kept
        )
        ctx.call = call
        ctx.set_materialize_grads(False)
        tiles = (None, None) if kept is None else kept.tiles
        ctx.save_for_backward(*inputs, saved_EHVK, o_THV, *tiles)
        return o_THV, final_NHVK

    @staticmethod
    def backward(
        ctx: Any, d_o_THV: Tensor | None, d_final_NHVK: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("kda_chunk")
        *tensors, saved_EHVK, o_THV, tile_CHX, vector_CHX = ctx.saved_tensors
        inputs = Inputs(*tensors)
        tiles = None if tile_CHX is None else Tiles(tile_CHX, vector_CHX)
        grads = _backward(ctx.call, inputs, saved_EHVK, tiles, o_THV, d_o_THV, d_final_NHVK)
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
    device = inputs.q_TGK.device
    num_slabs, reverse_chunks = call.backward_slabs, call.reverse_chunks
    if num_slabs is None:
        num_slabs = choose_backward_slabs(lengths, blocks.chunk, num_heads)
    if reverse_chunks is None:
        width = block_width(num_v)
        own = choose_backward_blocks(inputs.q_TGK.shape[2], num_v, call.precision)
        num_blocks, num_sms = width // min(own.values, width), num_multiprocessors(device)
        reverse_chunks = choose_segments(
            lengths, blocks.chunk, num_heads, num_blocks, num_sms, num_slabs, REVERSE
        )
    stretch = call.stretch or STRETCH
    return make_backward_plan(lengths, blocks.chunk, stretch, reverse_chunks, num_slabs, device)


def room_for_tiles(call: Call, inputs: Inputs, plan: BackwardPlan) -> KeptTiles | None:
    """For the tiles of all chunks, where the forward saves them."""
    num_heads, _, num_k = inputs.state_shape
    sizes = tile_sizes(num_k, True, call.blocks)
    each = sizes[0] * call.precision.operand.itemsize + sizes[1] * 4
    keeps_tiles = call.keeps_tiles
    if keeps_tiles is None:
        keeps_tiles = plan.num_chunks * num_heads * each <= KEPT_BYTES
    if not keeps_tiles:
        return None
    device, rest = inputs.q_TGK.device, (call.blocks, call.precision)
    tiles = make_tiles(device, num_heads, num_k, plan.num_chunks, True, *rest)
    return KeptTiles(tiles, plan.has_maps)


def forward_and_states(
    call: Call,
    inputs: Inputs,
    plan: BackwardPlan,
    offsets: tuple[tuple[int, ...], ...],
    checkpoints_EHVK: Tensor | None,
    kept: KeptTiles | None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """o, the final state, and the states [E, H, V, K] that the plan asks for."""
    device = inputs.q_TGK.device
    if checkpoints_EHVK is None:
        num_saved = sum(map(len, plan.offsets))
        saved = torch.empty(num_saved, *inputs.state_shape, dtype=torch.float32, device=device)
        has_saved = num_saved > 0
        own = plan.offsets if has_saved else ()
        return *run_forward(call, inputs, own, saved if has_saved else None, kept), saved
    merged = tuple(tuple(sorted({*a, *b})) for a, b in zip(offsets, plan.offsets, strict=True))
    numbers = {at: e for e, at in enumerate((n, t) for n, own in enumerate(merged) for t in own)}
    shape = (len(numbers), *inputs.state_shape)
    states = torch.empty(shape, dtype=torch.float32, device=device)
    results = run_forward(call, inputs, merged, states, kept)

    def chosen(wanted: tuple[tuple[int, ...], ...]) -> Tensor:
        rows = [numbers[n, t] for n, own in enumerate(wanted) for t in own]
        return states[send_table(rows, 1, device)[:, 0]]

    checkpoints_EHVK.copy_(chosen(offsets))
    return *results, chosen(plan.offsets)


def _backward(
    call: Call,
    inputs: Inputs,
    saved_EHVK: Tensor,
    tiles: Tiles | None,
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
    _run_slabs(call, inputs, plan, saved_EHVK, tiles, o_THV, d_o_THV, grads)
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
    tiles: Tiles | None,
    o_THV: Tensor,
    d_o_THV: Tensor,
    grads: Gradients,
) -> None:
    """All slabs, the last first."""
    q, k, v, gate = (last_contiguous(x) for x in inputs[:4])
    inputs = inputs._replace(q_TGK=q, k_TGK=k, v_THV=v, gate_THK=gate)
    blocks = choose_backward_blocks(q.shape[2], v.shape[2], call.precision)
    slabs = plan.slabs[::-1]
    spaces = [make_workspace(call, inputs, plan.most_chunks, tiles) for _ in slabs[:2]]
    given = None
    if tiles is not None:
        given = cut_tiles(tiles, [part.slab.num_chunks for part in plan.slabs])[::-1]
    is_pipeline = v.device.type == "cuda" and len(slabs) > 0
    own = torch.cuda.current_stream(v.device) if is_pipeline else None
    other = scan_stream(v.device) if is_pipeline else None
    done: list[torch.cuda.Event] = []
    for n in range(len(slabs) + 1):
        if n < len(slabs):
            part, space = slabs[n], spaces[n % 2]
            if given is None:
                make_slab_tiles(call, inputs, part, space.tiles)
            else:
                space = space._replace(tiles=given[n])
            if own is not None and other is not None:
                other.wait_event(own.record_event())
            with nullcontext() if other is None else torch.cuda.stream(other):
                run_reverse(call, part, space, d_o_THV, grads, blocks)
            if other is not None:
                done.append(other.record_event())
            keep_states(call, inputs, part, saved_EHVK, space)
        if n > 0:
            if own is not None:
                own.wait_event(done[n - 1])
            part, space = slabs[n - 1], spaces[(n - 1) % 2]
            if given is not None:
                space = space._replace(tiles=given[n - 1])
            run_chunks(call, inputs, part, space, o_THV, d_o_THV, grads, blocks)
