"""The two phases of Block AttnRes, exact (report 3.2): blocks once, running sum at every site.

Phase 1 (`attn_res_blocks`) mixes the finished blocks for all sites of the current block at once;
phase 2 (`attn_res_merge`) is all that is left at a site: the running sum's update, its merge with
phase 1 and the RMSNorm that follows. Together about 5.5 D values a token and layer instead of
(sources + 3) D. Inference only.

Legend: T tokens, D model width, S sites of one block, n finished sources.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from k3_kernels.attn_res.kernel import block_mix_kernel, block_scores_kernel, merge_kernel
from k3_kernels.attn_res.op import MAX_SOURCES, check_values, row_warps
from k3_kernels.launch import aligned, check_floats, dot_precision


class Tile(NamedTuple):
    """Tokens, channels a step and warps of the scores; channels and warps of the mix."""

    tokens: int
    step: int
    score_warps: int
    channels: int
    mix_warps: int


TILE = Tile(32, 128, 4, 128, 4)
SCORE_PROGRAMS, MAX_PARTS = 512, 8
"""Few tokens: the width is cut until about this many programs share the scores."""


def attn_res_blocks(
    values: Sequence[Tensor], queries_SD: Tensor, *, eps: float
) -> tuple[Tensor, Tensor]:
    """o [S, T, D] in the dtype of the sources and lse [S, T] in float32.

    queries: norm * proj of the S sites, float32. o is the softmax mix over the given sources and
    lse the logarithm of its denominator, which is what a merge with a further source needs.
    """
    if not 1 <= len(values) <= MAX_SOURCES or queries_SD.dtype != torch.float32:
        raise ValueError(
            f"attn_res_blocks: {len(values)} sources and {queries_SD.dtype} queries; needs 1 to "
            f"{MAX_SOURCES} sources and float32 queries"
        )
    check_values("attn_res_blocks", values, queries_SD[0], queries_SD[0])
    (num_tokens, width), num_queries = values[0].shape, len(queries_SD)
    like: dict[str, Any] = {"device": values[0].device}
    o_STD = torch.empty(num_queries, num_tokens, width, dtype=values[0].dtype, **like)
    lse_ST = torch.empty(num_queries, num_tokens, dtype=torch.float32, **like)
    if not num_tokens:
        return o_STD, lse_ST
    sources = tuple(aligned(value) for value in values)
    num_tiles = triton.cdiv(num_tokens, TILE.tokens) * len(sources)
    parts = max(1, min(MAX_PARTS, SCORE_PROGRAMS // num_tiles, triton.cdiv(width, TILE.step)))
    squares = torch.empty(parts, len(sources), num_tokens, dtype=torch.float32, **like)
    scores = torch.empty(*squares.shape, num_queries, dtype=torch.float32, **like)
    sizes = {
        "D": width,
        "NUM_SOURCES": len(sources),
        "PARTS": parts,
        "SPAD": max(16, triton.next_power_of_2(num_queries)),
        "PRECISION": dot_precision(values[0].dtype),
    }
    block_scores_kernel[(num_tiles * parts,)](
        sources,
        queries_SD.contiguous(),
        scores,
        squares,
        num_tokens,
        num_queries,
        BT=TILE.tokens,
        BD=TILE.step,
        num_warps=TILE.score_warps,
        **sizes,
    )
    block_d = min(TILE.channels, triton.next_power_of_2(width))
    block_mix_kernel[(num_tokens * triton.cdiv(width, block_d),)](
        sources,
        scores,
        squares,
        o_STD,
        lse_ST,
        num_tokens,
        num_queries,
        eps,
        NPAD=max(16, triton.next_power_of_2(len(sources))),
        BD=block_d,
        num_warps=TILE.mix_warps,
        **sizes,
    )
    return o_STD, lse_ST


def attn_res_merge(
    prefix_TD: Tensor,
    delta_TD: Tensor | None,
    blocks: tuple[Tensor, Tensor] | None,
    norm_D: Tensor,
    proj_1D: Tensor,
    out_norm_D: Tensor,
    *,
    eps: float,
    out_eps: float,
    return_mix: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """y = RMSNorm(mix; out_norm) [T, D] of one site, and the mix itself with `return_mix`.

    The running sum `prefix` [T, D] takes `delta` (the last sublayer's output, None for nothing)
    in place, rounded to its dtype. blocks: (o [T, D], lse [T]) of this site from phase 1; None
    when there is no finished block, then the mix is the running sum. At the first site of a
    block, whose running sum is still empty, the mix is o itself and needs no merge.
    """
    check_floats("attn_res_merge", prefix=prefix_TD, norm=norm_D, proj=proj_1D, out=out_norm_D)
    for name, x in {"delta": delta_TD, "blocks": None if blocks is None else blocks[0]}.items():
        if x is not None and x.shape != prefix_TD.shape:
            raise ValueError(
                f"attn_res_merge: {name} is {tuple(x.shape)}, prefix {tuple(prefix_TD.shape)}"
            )
    if not prefix_TD.is_contiguous():
        raise ValueError("attn_res_merge: prefix is written in place and must be contiguous")
    num_tokens, width = prefix_TD.shape
    out_TD = torch.empty_like(prefix_TD)
    mix_TD = torch.empty_like(prefix_TD) if return_mix else out_TD
    if num_tokens:
        merge_kernel[(num_tokens,)](
            prefix_TD if delta_TD is None else delta_TD.contiguous(),
            prefix_TD,
            prefix_TD if blocks is None else blocks[0].contiguous(),
            prefix_TD if blocks is None else blocks[1].contiguous(),
            norm_D.contiguous(),
            proj_1D.contiguous(),
            out_norm_D.contiguous(),
            mix_TD,
            out_TD,
            eps,
            out_eps,
            D=width,
            DPAD=triton.next_power_of_2(width),
            HAS_DELTA=delta_TD is not None,
            HAS_BLOCKS=blocks is not None,
            HAS_MIX=return_mix,
            num_warps=row_warps(width),
        )
    return (out_TD, mix_TD) if return_mix else out_TD
