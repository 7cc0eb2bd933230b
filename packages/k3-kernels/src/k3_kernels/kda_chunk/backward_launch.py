"""Launches of the parts of kda_chunk's backward for one slab.

Legend: T packed tokens, N sequences, H value heads, K key, V value channels, C chunks, E saved
states.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from k3_kernels.kda_chunk.backward_config import BackwardBlocks, reverse_values
from k3_kernels.kda_chunk.backward_kernel import chunk_backward_kernel
from k3_kernels.kda_chunk.backward_plan import ReverseSlab
from k3_kernels.kda_chunk.backward_scan import reverse_kernel
from k3_kernels.kda_chunk.config import block_width
from k3_kernels.kda_chunk.forward import Call, Inputs
from k3_kernels.kda_chunk.launch import TRITON, Gates, run_combine, run_pieces, run_prep
from k3_kernels.kda_chunk.plan import Pieces
from k3_kernels.kda_chunk.workspace import (
    Kept,
    Maps,
    Record,
    Tiles,
    make_kept,
    make_maps,
    make_tiles,
)


class Workspace(NamedTuple):
    """Of a slab; kept and d_state: of every chunk and head. The first two are slices of what the
    forward saved, where it did."""

    tiles: Tiles
    kept: Kept
    d_state_CHVK: Tensor


class Gradients(NamedTuple):
    """Results by value head, of queries if there are; sums: of dz and dz z over the tokens of each
    chunk (gates)."""

    d_q_THK: Tensor | None
    d_k_THK: Tensor
    d_v_THV: Tensor
    d_gate_THK: Tensor
    d_beta_TH: Tensor
    sum_CH2K: Tensor
    d_state_NHVK: Tensor


def make_workspace(call: Call, inputs: Inputs, num_chunks: int, record: Record | None) -> Workspace:
    """Room for what of a slab was not saved."""
    device, shape, rest = inputs.v_THV.device, inputs.state_shape, (call.blocks, call.precision)
    if record is None:
        has_reads = inputs.q_TGK is not None
        tiles = make_tiles(device, shape[0], shape[2], num_chunks, has_reads, *rest)
        return make_workspace(call, inputs, num_chunks, Record(tiles, None, False))
    kept = record.kept or make_kept(device, shape, num_chunks, *rest)
    rows, width = map(block_width, shape[1:])
    size = (num_chunks, shape[0], rows, width)
    d_state_CHVK = torch.empty(*size, dtype=call.precision.operand, device=device)
    return Workspace(record.tiles, kept, d_state_CHVK)


def make_slab_tiles(call: Call, inputs: Inputs, part: ReverseSlab, tiles: Tiles) -> None:
    """Tiles of the chunks of a slab, as in the forward."""
    gates, has_bound = Gates(*inputs[3:7], call.lower_bound), part.segments.maps.count > 0
    args = (call.scale, part.slab, tiles, call.blocks, call.precision, has_bound)
    run_prep(inputs.q_TGK, inputs.k_TGK, gates, *args)


def keep_states(
    call: Call, inputs: Inputs, part: ReverseSlab, saved_EHVK: Tensor, space: Workspace
) -> None:
    """States and deltas of the chunks of a slab."""
    run_pieces(
        inputs.v_THV,
        None,
        space.tiles,
        part.slab,
        part.stretches,
        inputs.initial_NHVK,
        saved_EHVK,
        None,
        None,
        saved_EHVK.shape[0] > 0,
        inputs.k_TGK.shape[2],
        call.blocks,
        call.precision,
        space.kept,
    )


def run_reverse(
    call: Call,
    part: ReverseSlab,
    space: Workspace,
    d_o_THV: Tensor | None,
    grads: Gradients,
    blocks: BackwardBlocks,
) -> None:
    """Gradients of v and of the states at the middles of chunks; d_state goes back by the slab."""
    num_heads, num_v, num_k = grads.d_state_NHVK.shape[1:]
    segments = part.segments
    if segments.runs.count == 0 or num_heads == 0:
        return
    starts = grads.d_state_NHVK
    if segments.maps.count:
        shape = (segments.count, num_heads, num_v, num_k)
        maps = make_maps(shape, call.precision.forget is not None, starts.device)
        _reverse_pieces(call, segments.maps, space, d_o_THV, grads, starts, blocks, maps)
        starts = run_combine(maps, segments.parts, starts, None, False, call.blocks, call.precision)
    _reverse_pieces(call, segments.runs, space, d_o_THV, grads, starts, blocks, None)


def _reverse_pieces(
    call: Call,
    pieces: Pieces,
    space: Workspace,
    d_o_THV: Tensor | None,
    grads: Gradients,
    starts: Tensor,
    blocks: BackwardBlocks,
    maps: Maps | None,
) -> None:
    """The reverse scan of some pieces; for `maps` it makes nothing else."""
    num_heads, num_v, num_k = grads.d_state_NHVK.shape[1:]
    width, precision = block_width(num_v), call.precision
    values = reverse_values(blocks, width, pieces.count * num_heads)
    num_value_blocks = width // values
    num_blocks = num_value_blocks + (0 if maps is None else -(-num_k // values))
    can_forget = maps is not None and maps.kept_JH is not None
    transition, end, known = (None, grads.d_state_NHVK, None) if maps is None else maps
    d_out = grads.d_v_THV if d_o_THV is None else d_o_THV
    reverse_kernel[(pieces.count * num_heads * num_blocks,)](
        d_out,
        grads.d_v_THV,
        *space.tiles,
        pieces.table,
        starts,
        end,
        end if transition is None else transition,
        end if known is None else known,
        space.d_state_CHVK,
        num_heads,
        precision.forget or 0.0,
        *d_out.stride()[:2],
        *grads.d_v_THV.stride()[:2],
        K=num_k,
        V=num_v,
        BK=block_width(num_k),
        BV=values,
        BT=call.blocks.chunk,
        TILES=space.tiles.tile_CHX.shape[2],
        VECTORS=space.tiles.vector_CHX.shape[2],
        STAGES=blocks.stages,
        NUM_BLOCKS=num_blocks,
        NUM_VALUE_BLOCKS=num_value_blocks,
        IS_SUMMARY=maps is not None,
        HAS_READS=d_o_THV is not None,
        MAX_CHUNKS=triton.next_power_of_2(pieces.most_chunks) if can_forget else 0,
        OPERAND=TRITON[precision.operand],
        PRECISION=precision.dot,
        num_warps=blocks.warps,
    )


def run_chunks(
    call: Call,
    inputs: Inputs,
    part: ReverseSlab,
    space: Workspace,
    o_THV: Tensor | None,
    d_o_THV: Tensor | None,
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
    # Without reads what is given in place of these is not touched.
    q, d_q = k if q is None else q, grads.d_k_THK if grads.d_q_THK is None else grads.d_q_THK
    d_out = v if d_o_THV is None else d_o_THV
    chunk_backward_kernel[(slab.num_chunks * num_heads * (key_width // channels),)](
        q,
        k,
        gate,
        beta,
        A_log_H.contiguous(),
        dt_bias_HK.contiguous(),
        v,
        d_out if o_THV is None else o_THV,
        d_out,
        grads.d_v_THV,
        slab.chunks,
        space.tiles.vector_CHX,
        *space.kept,
        space.d_state_CHVK,
        d_q,
        grads.d_k_THK,
        grads.d_gate_THK,
        grads.d_beta_TH,
        grads.sum_CH2K[part.first_chunk :],
        num_heads,
        width,
        call.lower_bound,
        1.0 / call.scale if call.scale else 0.0,
        *(s for x in (q, k, gate, beta, v, d_out) for s in x.stride()[:2]),
        GROUP=num_heads // q.shape[1],
        K=num_k,
        V=num_v,
        BK=key_width,
        BV=min(blocks.chunk_values, width),
        BC=channels,
        BT=call.blocks.chunk,
        VECTORS=space.tiles.vector_CHX.shape[2],
        STAGES=blocks.chunk_stages,
        HAS_READS=o_THV is not None,
        OPERAND=TRITON[precision.operand],
        SUMS=TRITON[precision.sums],
        PRECISION=precision.dot,
        SUM_PRECISION=precision.map_dot if precision.sums == torch.float32 else precision.dot,
        num_warps=blocks.chunk_warps,
        num_stages=1,
        maxnreg=blocks.chunk_registers,
    )
