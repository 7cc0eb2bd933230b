"""Launches of the KDA kernels: workspace, grids, and the order of prep, maps, composition, run.

Legend: T packed tokens, N sequences, H heads, K key, V value channels, C chunks, B chunk tokens,
J segments, X = K rounded up to a power of two.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from k3_kernels.kda_chunk.combine import combine_kernel
from k3_kernels.kda_chunk.config import Blocks, Precision, block_width
from k3_kernels.kda_chunk.plan import Pieces, Plan, Segments, decay_sums
from k3_kernels.kda_chunk.prep import prep_kernel
from k3_kernels.kda_chunk.scan import scan_kernel
from k3_kernels.launch import last_contiguous

_TRITON = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


class Gates(NamedTuple):
    """What decay and write strength are computed from."""

    gate_THK: Tensor
    beta_TH: Tensor
    A_log_H: Tensor
    dt_bias_HK: Tensor
    lower_bound: float


class Tiles(NamedTuple):
    """The workspace; see prep.py."""

    erase_CHBX: Tensor
    reads_CHBX: Tensor
    writes_CHBX: Tensor
    solve_CHBB: Tensor
    mix_CHBB: Tensor
    decay_CHX: Tensor


def run_prep(
    q_THK: Tensor | None,
    k_THK: Tensor,
    gates: Gates,
    scale: float,
    plan: Plan,
    blocks: Blocks,
    precision: Precision,
) -> Tiles:
    """Tiles of every chunk and head; without q, only what the state needs."""
    (_, num_heads, num_k), chunk = k_THK.shape, blocks.chunk
    width = block_width(num_k)
    lead = (plan.num_chunks, num_heads)

    def tile(*shape: int) -> Tensor:
        return k_THK.new_empty(*lead, *shape, dtype=precision.operand)

    has_reads = q_THK is not None
    erase, writes, solve = tile(chunk, width), tile(chunk, width), tile(chunk, chunk)
    reads, mix = (tile(chunk, width), tile(chunk, chunk)) if has_reads else (erase, solve)
    decay = k_THK.new_empty(*lead, width, dtype=torch.float32)
    tiles = Tiles(erase, reads, writes, solve, mix, decay)
    if plan.num_chunks == 0 or num_heads == 0:
        return tiles
    q, k = last_contiguous(k_THK if q_THK is None else q_THK), last_contiguous(k_THK)
    gate = last_contiguous(gates.gate_THK)
    prep_kernel[(plan.num_chunks * num_heads,)](
        q,
        k,
        gate,
        gates.beta_TH,
        gates.A_log_H.contiguous(),
        gates.dt_bias_HK.contiguous(),
        plan.chunks,
        decay_sums(chunk, min(chunk, blocks.tile), precision.gram, k.device),
        *tiles,
        num_heads,
        gates.lower_bound,
        scale,
        *(s for x in (q, k, gate, gates.beta_TH) for s in x.stride()[:2]),
        K=num_k,
        BK=width,
        BC=min(width, blocks.channels),
        BT=chunk,
        TILE=min(chunk, blocks.tile),
        HAS_READS=has_reads,
        OPERAND=_TRITON[precision.operand],
        GRAM=_TRITON[precision.gram],
        SOLVE=_TRITON[precision.solve],
        IS_SPLIT=precision.gram != torch.float32,
        PRECISION=precision.dot,
        SUM_PRECISION=precision.map_dot if precision.gram == torch.float32 else precision.dot,
        num_warps=blocks.prep_warps,
        num_stages=1,
        maxnreg=blocks.prep_registers,
    )
    return tiles


def _run_scan(
    v_THV: Tensor,
    o_THV: Tensor | None,
    tiles: Tiles,
    pieces: Pieces,
    initial: Tensor | None,
    final: Tensor | None,
    maps: Tensor | None,
    num_k: int,
    blocks: Blocks,
    precision: Precision,
) -> None:
    num_heads, num_v = v_THV.shape[1:]
    if pieces.count == 0 or num_heads == 0:
        return
    width = block_width(num_k)
    block = min(blocks.values, block_width(num_v))
    num_value_blocks = -(-num_v // block)
    num_blocks = num_value_blocks + (0 if maps is None else -(-num_k // block))
    output = v_THV if o_THV is None else o_THV
    scan_kernel[(pieces.count * num_heads * num_blocks,)](
        v_THV,
        output,
        *tiles,
        pieces.table,
        tiles.decay_CHX if initial is None else initial,
        tiles.decay_CHX if final is None else final,
        tiles.decay_CHX if maps is None else maps,
        num_heads,
        *v_THV.stride()[:2],
        *output.stride()[:2],
        K=num_k,
        V=num_v,
        BK=width,
        BV=block,
        BT=blocks.chunk,
        NUM_BLOCKS=num_blocks,
        NUM_VALUE_BLOCKS=num_value_blocks,
        HAS_INITIAL=initial is not None,
        HAS_FINAL=final is not None,
        IS_SUMMARY=maps is not None,
        OPERAND=_TRITON[precision.operand],
        PRECISION=precision.dot,
        num_warps=blocks.scan_warps,
        num_stages=blocks.scan_stages,
    )


def run_maps(
    v_THV: Tensor,
    tiles: Tiles,
    pieces: Pieces,
    num_maps: int,
    num_k: int,
    blocks: Blocks,
    precision: Precision,
) -> tuple[Tensor, Tensor]:
    """The affine maps (M [J, H, K, K], S [J, H, V, K]) of the pieces, by their final index."""
    num_heads, num_v = v_THV.shape[1:]
    maps = v_THV.new_empty(num_maps, num_heads, num_k, num_k, dtype=torch.float32)
    shifts = v_THV.new_empty(num_maps, num_heads, num_v, num_k, dtype=torch.float32)
    _run_scan(
        last_contiguous(v_THV), None, tiles, pieces, None, shifts, maps, num_k, blocks, precision
    )
    return maps, shifts


def _start_states(
    v_THV: Tensor,
    tiles: Tiles,
    segments: Segments,
    initial: Tensor | None,
    num_k: int,
    blocks: Blocks,
    precision: Precision,
) -> Tensor:
    num_heads, num_v = v_THV.shape[1:]
    maps, shifts = run_maps(v_THV, tiles, segments.maps, segments.count, num_k, blocks, precision)
    starts = torch.empty_like(shifts)
    num_blocks = -(-num_v // blocks.combine_values)
    num_sequences = segments.first.shape[0] - 1
    combine_kernel[(num_sequences * num_heads * num_blocks,)](
        starts if initial is None else initial,
        maps,
        shifts,
        starts,
        segments.first,
        num_heads,
        K=num_k,
        V=num_v,
        BK=block_width(num_k),
        BV=blocks.combine_values,
        NUM_BLOCKS=num_blocks,
        HAS_INITIAL=initial is not None,
        PRECISION=precision.map_dot,
        num_warps=8,
        num_stages=1,
    )
    return starts


def run_scan(
    v_THV: Tensor,
    tiles: Tiles,
    plan: Plan,
    initial: Tensor | None,
    final: Tensor | None,
    num_k: int,
    blocks: Blocks,
    precision: Precision,
) -> Tensor:
    """o [T, H, V]; `final` [N, H, V, K], when given, receives the final states."""
    v_THV = last_contiguous(v_THV)
    o_THV = torch.empty(v_THV.shape, dtype=v_THV.dtype, device=v_THV.device)
    pieces = plan.sequences
    if plan.segments is not None:
        pieces = plan.segments.runs
        initial = _start_states(v_THV, tiles, plan.segments, initial, num_k, blocks, precision)
    _run_scan(v_THV, o_THV, tiles, pieces, initial, final, None, num_k, blocks, precision)
    return o_THV
