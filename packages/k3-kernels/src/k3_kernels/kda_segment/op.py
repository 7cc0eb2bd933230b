"""kda_segment on Triton: prep without queries, then the scan of kda_chunk seeded for a map.

Legend: T packed tokens, N stretches, H heads, K key, V value channels.
"""

from __future__ import annotations

from torch import Tensor

from k3_core.custom_op import custom_op
from k3_core.ops.kda_chunk.inputs import check_inputs
from k3_core.ops.kda_segment import AffineMap
from k3_core.ops.varlen import host_lengths
from k3_kernels.kda_chunk.config import Blocks, Precision, choose_blocks
from k3_kernels.kda_chunk.launch import Gates, run_maps, run_prep
from k3_kernels.kda_chunk.op import check_bound, default_precision
from k3_kernels.kda_chunk.plan import make_plan
from k3_kernels.kda_chunk.workspace import make_tiles
from k3_kernels.kda_segment import cpu as torch_segment
from k3_kernels.launch import last_contiguous, needs_grad


@custom_op("kda_segment.triton")
def kda_segment(
    k_THK: Tensor,
    v_THV: Tensor,
    gate_THK: Tensor,
    beta_TH: Tensor,
    A_log_H: Tensor,
    dt_bias_HK: Tensor,
    *,
    lower_bound: float | None,
    cu_seqlens_N1: Tensor,
    seqlens: tuple[int, ...] | None = None,
    precision: Precision | None = None,
    blocks: Blocks | None = None,
) -> AffineMap:
    """(M, S) of each stretch; arguments and results as `k3_core.ops.kda_segment.KdaSegment`.

    `precision` and `blocks` replace what the tables of kda_chunk would choose. Where a gradient is
    needed the plain torch form runs instead.
    """
    args = (k_THK, v_THV, gate_THK, beta_TH, A_log_H, dt_bias_HK)
    if needs_grad(*args):
        return torch_segment.kda_segment(
            *args, lower_bound=lower_bound, cu_seqlens_N1=cu_seqlens_N1, seqlens=seqlens
        )
    check_inputs("kda_segment", k_THK, *args, lower_bound)
    bound = check_bound("kda_segment", lower_bound)
    precision = precision or default_precision("kda_segment", k_THK.dtype)
    lengths = host_lengths(cu_seqlens_N1, seqlens, k_THK.shape[0], "kda_segment")
    num_k = k_THK.shape[2]
    blocks = blocks or choose_blocks(num_k, v_THV.shape[2], precision)
    (slab,) = make_plan(lengths, blocks.chunk, 0, k_THK.device).slabs
    num_heads = gate_THK.shape[1]
    tiles = make_tiles(k_THK.device, num_heads, num_k, slab.num_chunks, False, blocks, precision)
    k_THK, v_THV, gate_THK = (last_contiguous(x) for x in (k_THK, v_THV, gate_THK))
    gates = Gates(gate_THK, beta_TH, A_log_H, dt_bias_HK, bound)
    run_prep(None, k_THK, gates, 1.0, slab, tiles, blocks, precision)
    maps = run_maps(v_THV, tiles, slab, slab.pieces, len(lengths), num_k, blocks, precision)
    return maps.map_JHKK, maps.shift_JHVK
