"""Launches of the KDA kernels: workspace, grids, and the order of prep, maps, composition, run.

A plan of several slabs runs as a pipeline: prep fills one of two workspaces while the scan, which
waits for its own chain and leaves multiprocessors idle, reads the other, on a second stream.
Legend: T packed tokens, N sequences, H value heads, K key, V value channels, C chunks of a slab,
J segments, E exported states.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3_kernels.kda_chunk.combine import combine_kernel
from k3_kernels.kda_chunk.config import Blocks, Precision, block_width
from k3_kernels.kda_chunk.plan import Pieces, Plan, Slab
from k3_kernels.kda_chunk.prep import prep_kernel
from k3_kernels.kda_chunk.scan import scan_kernel
from k3_kernels.kda_chunk.workspace import (
    Kept,
    Maps,
    Record,
    Tiles,
    cut_chunks_of,
    make_maps,
    make_tiles,
)
from k3_kernels.launch import last_contiguous

TRITON = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}
"""Triton's name of a dtype."""


class Gates(NamedTuple):
    """What decay and write strength are computed from."""

    gate_THK: Tensor
    beta_TH: Tensor
    A_log_H: Tensor
    dt_bias_HK: Tensor
    lower_bound: float


def run_prep(
    q_THK: Tensor | None,
    k_THK: Tensor,
    gates: Gates,
    scale: float,
    slab: Slab,
    tiles: Tiles,
    blocks: Blocks,
    precision: Precision,
    has_bound: bool = False,
) -> None:
    """Fill the tiles of every chunk and value head; without q, only what the state needs.

    The last dimensions of q, k and the gate are contiguous. has_bound: whether a backward needs
    the bounds that the maps of segments take.
    """
    num_k, num_heads = k_THK.shape[2], gates.gate_THK.shape[1]
    if slab.num_chunks == 0 or num_heads == 0:
        return
    q_THK_or_k, gate_THK = k_THK if q_THK is None else q_THK, gates.gate_THK
    width = block_width(num_k)
    prep_kernel[(slab.num_chunks * num_heads,)](
        q_THK_or_k,
        k_THK,
        gate_THK,
        gates.beta_TH,
        gates.A_log_H.contiguous(),
        gates.dt_bias_HK.contiguous(),
        slab.chunks,
        *tiles,
        num_heads,
        gates.lower_bound,
        scale,
        *(s for x in (q_THK_or_k, k_THK, gate_THK, gates.beta_TH) for s in x.stride()[:2]),
        GROUP=num_heads // k_THK.shape[1],
        K=num_k,
        BK=width,
        BC=min(width, blocks.channels),
        BT=blocks.chunk,
        TILES=tiles.tile_CHX.shape[2],
        VECTORS=tiles.vector_CHX.shape[2],
        STAGES=blocks.prep_stages,
        HAS_READS=q_THK is not None,
        HAS_BOUND=_can_forget(slab, precision) or (has_bound and precision.forget is not None),
        OPERAND=TRITON[precision.operand],
        SUMS=TRITON[precision.sums],
        SOLVE=TRITON[precision.solve],
        PRECISION=precision.dot,
        SUM_PRECISION=precision.map_dot if precision.sums == torch.float32 else precision.dot,
        num_warps=blocks.prep_warps,
        maxnreg=blocks.prep_registers,
    )


def _can_forget(slab: Slab, precision: Precision) -> bool:
    """Whether prep bounds what chunks leave of a state, for the maps of segments."""
    return slab.segments is not None and precision.forget is not None


def run_pieces(
    v_THV: Tensor,
    o_THV: Tensor | None,
    tiles: Tiles,
    slab: Slab,
    pieces: Pieces,
    initial: Tensor | None,
    final: Tensor | None,
    maps: Maps | None,
    exports: Tensor | None,
    has_carry: bool,
    num_k: int,
    blocks: Blocks,
    precision: Precision,
    kept: Kept | None = None,
) -> None:
    """The scan of some pieces; without o_THV it makes no outputs, and with `kept` in their place
    leaves `final` as it is."""
    num_heads, num_v = v_THV.shape[1:]
    if pieces.count == 0 or num_heads == 0:
        return
    width = block_width(num_k)
    transition, final, sizes = (None, final, None) if maps is None else maps
    max_chunks = 0 if sizes is None else triton.next_power_of_2(pieces.most_chunks)
    block = min(blocks.values, block_width(num_v))
    num_value_blocks = -(-(num_v if kept is None else block_width(num_v)) // block)
    num_blocks = num_value_blocks + (0 if maps is None else -(-num_k // block))
    output = v_THV if o_THV is None else o_THV
    scan_kernel[(pieces.count * num_heads * num_blocks,)](
        v_THV,
        output,
        *tiles,
        pieces.table,
        slab.chunks,
        *(
            tiles.vector_CHX if x is None else x
            for x in (initial, final, transition, sizes, exports, *(kept or (None, None)))
        ),
        num_heads,
        slab.most_runs,
        precision.forget or 0.0,
        *v_THV.stride()[:2],
        *output.stride()[:2],
        K=num_k,
        V=num_v,
        BK=width,
        BV=block,
        BT=blocks.chunk,
        TILES=tiles.tile_CHX.shape[2],
        VECTORS=tiles.vector_CHX.shape[2],
        STAGES=blocks.scan_stages,
        NUM_BLOCKS=num_blocks,
        NUM_VALUE_BLOCKS=num_value_blocks,
        HAS_INITIAL=initial is not None,
        HAS_CARRY=has_carry,
        HAS_FINAL=final is not None and (kept is None or o_THV is not None),
        HAS_EXPORTS=exports is not None and slab.is_cut,
        IS_CUT=slab.is_cut,
        IS_SUMMARY=maps is not None,
        IS_KEPT=kept is not None,
        HAS_OUTPUT=o_THV is not None,
        MAX_CHUNKS=max_chunks,
        OPERAND=TRITON[precision.operand],
        PRECISION=precision.dot,
        num_warps=blocks.scan_warps,
    )


def run_maps(
    v_THV: Tensor,
    tiles: Tiles,
    slab: Slab,
    pieces: Pieces,
    num_maps: int,
    num_k: int,
    blocks: Blocks,
    precision: Precision,
) -> Maps:
    """The affine maps of pieces, by their final index. The last dimension of v is contiguous."""
    num_heads, num_v = v_THV.shape[1:]
    shape = (num_maps, num_heads, num_v, num_k)
    result = make_maps(shape, _can_forget(slab, precision), v_THV.device)
    run_pieces(
        v_THV, None, tiles, slab, pieces, None, None, result, None, False, num_k, blocks, precision
    )
    return result


def run_combine(
    maps: Maps,
    parts: Tensor,
    initial: Tensor | None,
    final: Tensor | None,
    has_carry: bool,
    blocks: Blocks,
    precision: Precision,
) -> Tensor:
    """The states [J, H, V, K] that the segments of `parts` (plan.py) start from."""
    num_heads, num_v, num_k = maps.shift_JHVK.shape[1:]
    starts = torch.empty_like(maps.shift_JHVK)
    num_blocks = -(-num_v // blocks.combine_values)
    combine_kernel[((parts.shape[0] - 1) * num_heads * num_blocks,)](
        starts if initial is None else initial,
        maps.map_JHKK,
        maps.shift_JHVK,
        maps.map_JHKK if maps.kept_JH is None else maps.kept_JH,
        starts,
        starts if final is None else final,
        parts,
        num_heads,
        K=num_k,
        V=num_v,
        BK=block_width(num_k),
        BV=blocks.combine_values,
        NUM_BLOCKS=num_blocks,
        HAS_INITIAL=initial is not None,
        HAS_CARRY=has_carry,
        HAS_BOUND=maps.kept_JH is not None,
        PRECISION=precision.map_dot,
        num_warps=8,
        num_stages=1,
    )
    return starts


def run_scan(
    v_THV: Tensor,
    o_THV: Tensor | None,
    tiles: Tiles,
    slab: Slab,
    initial: Tensor | None,
    final: Tensor | None,
    exports: Tensor | None,
    num_k: int,
    blocks: Blocks,
    precision: Precision,
    kept: Kept | None = None,
) -> None:
    """The tokens of a slab of o [T, H, V]; `final` [N, H, V, K] and `exports` [E, H, V, K] receive
    states; all when given. A slab that goes on with a sequence takes its state from `final`."""
    pieces, has_carry = slab.pieces, slab.has_carry
    segments = slab.segments
    if segments is not None:
        maps = run_maps(v_THV, tiles, slab, segments.maps, segments.count, num_k, blocks, precision)
        initial = run_combine(maps, segments.parts, initial, final, has_carry, blocks, precision)
        pieces, has_carry = segments.runs, False
    run_pieces(
        v_THV,
        o_THV,
        tiles,
        slab,
        pieces,
        initial,
        final,
        None,
        exports,
        has_carry,
        num_k,
        blocks,
        precision,
        kept,
    )


@lru_cache(maxsize=16)
def scan_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of scans; of high priority, since they are few programs that wait most."""
    return torch.cuda.Stream(device, priority=-1)


def run_plan(
    q_THK: Tensor | None,
    k_THK: Tensor,
    v_THV: Tensor,
    gates: Gates,
    scale: float,
    plan: Plan,
    initial: Tensor | None,
    final: Tensor | None,
    exports: Tensor | None,
    blocks: Blocks,
    precision: Precision,
    record: Record | None = None,
) -> Tensor | None:
    """o [T, H, V] of all slabs, where there are queries; states as in run_scan. What a backward
    takes goes to `record`."""
    num_k, num_heads, has_reads = k_THK.shape[2], v_THV.shape[1], q_THK is not None
    k_THK, v_THV = last_contiguous(k_THK), last_contiguous(v_THV)
    q_THK = None if q_THK is None else last_contiguous(q_THK)
    gates = gates._replace(gate_THK=last_contiguous(gates.gate_THK))
    o_THV = torch.empty_like(v_THV, memory_format=torch.contiguous_format) if has_reads else None
    counts = [slab.num_chunks for slab in plan.slabs]
    if record is None:
        most = max(counts)
        workspaces = [
            make_tiles(v_THV.device, num_heads, num_k, most, has_reads, blocks, precision)
            for _ in plan.slabs[:2]
        ]
    else:
        workspaces = cut_chunks_of(record.tiles, counts)
    kept = None if record is None or record.kept is None else cut_chunks_of(record.kept, counts)
    is_pipeline = v_THV.device.type == "cuda" and len(plan.slabs) > 1
    own = torch.cuda.current_stream(v_THV.device) if is_pipeline else None
    other = scan_stream(v_THV.device) if is_pipeline else None
    free: list[torch.cuda.Event] = []
    for n, slab in enumerate(plan.slabs):
        tiles = workspaces[n % len(workspaces)]
        if own is not None and n >= len(workspaces):
            own.wait_event(free[n - len(workspaces)])
        has_bound = record is not None and record.has_bound
        run_prep(q_THK, k_THK, gates, scale, slab, tiles, blocks, precision, has_bound)
        if own is not None and other is not None:
            other.wait_event(own.record_event())
        with nullcontext() if other is None else torch.cuda.stream(other):
            run_scan(
                v_THV,
                o_THV,
                tiles,
                slab,
                initial,
                final,
                exports,
                num_k,
                blocks,
                precision,
                None if kept is None else kept[n],
            )
        if other is not None:
            free.append(other.record_event())
    if own is not None and free:
        own.wait_event(free[-1])
    return o_THV
