"""kda_segment on Triton: prep without queries, then the scan of kda_chunk seeded for a map.

With gradients it is kda_chunk without queries on V + K value channels, from the state [0; I] to
[S; M]: a row of M is driven as one of S whose values are zero. Its backward, with gradients of
[S; M] as that of the final state, is the transposed composition: the reverse scan carries them
back, d_before = d_after M^T, chunk by chunk, and the last kernel sums over all V + K rows. Saved
are the inputs and states at the starts of stretches, as in kda_chunk/backward.py.

Legend: T packed tokens, N stretches, H heads, K key, V value channels.
"""

from __future__ import annotations

from torch import Tensor

from k3_core.custom_op import custom_op
from k3_core.ops.kda_chunk.inputs import check_inputs
from k3_core.ops.kda_segment import AffineMap
from k3_core.ops.kda_segment.augment import augment, split
from k3_core.ops.varlen import host_lengths
from k3_kernels.kda_chunk.backward import run_with_gradients
from k3_kernels.kda_chunk.backward_plan import choose_backward_slabs
from k3_kernels.kda_chunk.config import MAX_CHANNELS, Blocks, Precision, choose_blocks
from k3_kernels.kda_chunk.forward import Call, Inputs, Saves
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
    needed and K + V is more than the kernels' widest head, the plain torch form runs instead.
    """
    args = (k_THK, v_THV, gate_THK, beta_TH, A_log_H, dt_bias_HK)
    has_grad, (num_k, num_v) = needs_grad(*args), (k_THK.shape[-1], v_THV.shape[-1])
    if has_grad and num_k + num_v > MAX_CHANNELS:
        return torch_segment.kda_segment(
            *args, lower_bound=lower_bound, cu_seqlens_N1=cu_seqlens_N1, seqlens=seqlens
        )
    check_inputs("kda_segment", k_THK, *args, lower_bound)
    bound = check_bound("kda_segment", lower_bound)
    precision = precision or default_precision("kda_segment", k_THK.dtype)
    lengths = host_lengths(cu_seqlens_N1, seqlens, k_THK.shape[0], "kda_segment")
    blocks = blocks or choose_blocks(num_k, num_v, precision)
    if has_grad:
        return _with_gradients(Inputs(None, *args, None), lengths, bound, blocks, precision)
    (slab,) = make_plan(lengths, blocks.chunk, 0, k_THK.device).slabs
    num_heads = gate_THK.shape[1]
    tiles = make_tiles(k_THK.device, num_heads, num_k, slab.num_chunks, False, blocks, precision)
    k_THK, v_THV, gate_THK = (last_contiguous(x) for x in (k_THK, v_THV, gate_THK))
    gates = Gates(gate_THK, beta_TH, A_log_H, dt_bias_HK, bound)
    run_prep(None, k_THK, gates, 1.0, slab, tiles, blocks, precision)
    maps = run_maps(v_THV, tiles, slab, slab.pieces, len(lengths), num_k, blocks, precision)
    return maps.map_JHKK, maps.shift_JHVK


def _with_gradients(
    inputs: Inputs,
    lengths: tuple[int, ...],
    bound: float,
    blocks: Blocks,
    precision: Precision,
) -> AffineMap:
    """(M, S) as the final states of V + K value channels; a chunk has the workspace of two."""
    num_v = inputs.v_THV.shape[-1]
    values, seed_NHVK = augment(inputs.k_TGK, inputs.v_THV, len(lengths))
    num_slabs = choose_backward_slabs(lengths, blocks.chunk, 2 * values.shape[1])
    call = Call(
        lengths,
        bound,
        1.0,
        True,
        blocks,
        precision,
        backward_slabs=num_slabs,
        saves=Saves.NOTHING,
    )
    inputs = inputs._replace(v_THV=values, initial_NHVK=seed_NHVK)
    _, final_NHVK = run_with_gradients(call, inputs, (), None)
    assert final_NHVK is not None
    return split(final_NHVK, num_v)
