"""mla_decode by Triton. B sequences, H heads, C latent, R shared key, P pages of L tokens."""

from __future__ import annotations

import math
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from k3_core.custom_op import custom_op
from k3_core.ops.mla_decode import reference
from k3_kernels.early import early_launch
from k3_kernels.hopper import fits_descriptors, has_gluon
from k3_kernels.launch import check_floats, dot_precision, last_contiguous, needs_grad
from k3_kernels.mla_decode.kernel import mla_decode_kernel, reduce_kernel


class Tile(NamedTuple):
    """Most heads and tokens of a step, warps, pipeline stages."""

    heads: int
    tokens: int
    num_warps: int
    num_stages: int


TILES = {2: Tile(64, 64, 8, 2), 4: Tile(16, 16, 4, 1)}
"""By the bytes of a value. 16-bit at C + R = 576: 72 KiB of queries and as much a stage."""
TILE_FEW_HEADS = Tile(16, 64, 4, 2)
"""16-bit, up to 16 heads. On an H200, 8 heads of 128 + 64, 64 rows of 32K tokens: 195 us, with 8
warps 296 us (bytes alone 190)."""
PROGRAMS_PER_PROCESSOR = 4
"""Pieces are cut until there are this many programs for each multiprocessor."""
MAX_SPLITS = 64
PROGRAM_TILES = 6
"""What a program of the Gluon kernel costs beside its tiles of 64 tokens, in such tiles."""


@custom_op("mla_decode.triton")
def mla_decode(
    q_latent_BHC: Tensor,
    q_rope_BHR: Tensor,
    pages_PLX: Tensor,
    page_table_BM: Tensor,
    lengths_B: Tensor,
    *,
    scale: float,
) -> Tensor:
    """As `mla_decode.reference`: o_latent [B, H, C], zeros for a sequence of length 0.

    Entries of the page table past a sequence's length are never followed; cache rows past it are
    never read. The number of pieces follows from shapes only, so a graph can be replayed while
    lengths grow. Calls that need gradients run the reference.
    """
    if needs_grad(q_latent_BHC, q_rope_BHR, pages_PLX):
        return reference.mla_decode(
            q_latent_BHC, q_rope_BHR, pages_PLX, page_table_BM, lengths_B, scale=scale
        )
    _check(q_latent_BHC, q_rope_BHR, pages_PLX, page_table_BM, lengths_B)
    num_rows, num_heads, latent = q_latent_BHC.shape
    out_BHC = torch.empty(q_latent_BHC.shape, dtype=q_latent_BHC.dtype, device=pages_PLX.device)
    if not out_BHC.numel():
        return out_BHC
    part_BHSC, lse_BHS = attend_pieces(
        q_latent_BHC, q_rope_BHR, pages_PLX, page_table_BM, lengths_B, scale
    )
    splits, padded = lse_BHS.shape[2], triton.next_power_of_2(latent)
    # Few pieces are read by few programs, many by enough to fill the card with a small batch.
    block = padded if splits <= 4 else min(padded, 128)
    reduce_kernel[(num_rows * num_heads * triton.cdiv(latent, block),)](
        part_BHSC,
        lse_BHS,
        out_BHC,
        splits,
        C=latent,
        SPAD=triton.next_power_of_2(splits),
        BS=min(16, triton.next_power_of_2(splits)),
        BC=block,
        **early_launch(num_rows, out_BHC.device),
        num_warps=4,
    )
    return out_BHC


def attend_pieces(
    q_latent_BHC: Tensor,
    q_rope_BHR: Tensor,
    pages_PLX: Tensor,
    page_table_BM: Tensor,
    lengths_B: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The normalised output [B, H, S, C] of every piece and its log-sum-exp [B, H, S], base 2, in
    float32; a piece without tokens has -inf, and an output that is not written."""
    num_rows, num_heads, _ = q_latent_BHC.shape
    q_latent_BHC, q_rope_BHR, pages_PLX, page_table_BM = (
        last_contiguous(x) for x in (q_latent_BHC, q_rope_BHR, pages_PLX, page_table_BM)
    )
    lengths_B = lengths_B.contiguous()
    args = (q_latent_BHC, q_rope_BHR, pages_PLX, page_table_BM, lengths_B)
    if uses_gluon(q_latent_BHC, q_rope_BHR, pages_PLX):
        # Its module compiles only where it runs, so only this line imports it.
        from k3_kernels.mla_decode import gluon

        num_programs = num_rows * triton.cdiv(num_heads, gluon.HEADS)
        num_steps = page_table_BM.shape[1] * pages_PLX.shape[1] // gluon.TOKENS
        splits = splits_in_waves(num_programs, num_steps, _processors(pages_PLX.device))
        part_BHSC, lse_BHS = _pieces(q_latent_BHC, splits)
        gluon.run(*args, part_BHSC, lse_BHS, scale)
        return part_BHSC, lse_BHS
    return _run(*args, scale)


def uses_gluon(q_latent_BHC: Tensor, q_rope_BHR: Tensor, pages_PLX: Tensor) -> bool:
    """The rule: released widths in 16 bits, pages of whole tiles that descriptors read, Hopper."""
    return (
        q_latent_BHC.element_size() == 2
        and q_latent_BHC.dtype == pages_PLX.dtype
        and (q_latent_BHC.shape[-1], q_rope_BHR.shape[-1]) == (512, 64)
        and pages_PLX.shape[1] % 64 == 0
        and pages_PLX.stride(0) % pages_PLX.stride(1) == 0
        and fits_descriptors(pages_PLX)
        and has_gluon(pages_PLX.device)
    )


def _pieces(q_latent_BHC: Tensor, splits: int) -> tuple[Tensor, Tensor]:
    """Room for the results of `attend_pieces`."""
    num_rows, num_heads, latent = q_latent_BHC.shape
    like: dict[str, Any] = {"dtype": torch.float32, "device": q_latent_BHC.device}
    return (
        torch.empty(num_rows, num_heads, splits, latent, **like),
        torch.empty(num_rows, num_heads, splits, **like),
    )


def _run(
    q_latent_BHC: Tensor,
    q_rope_BHR: Tensor,
    pages_PLX: Tensor,
    page_table_BM: Tensor,
    lengths_B: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Plain Triton, for every shape."""
    num_rows, num_heads, latent = q_latent_BHC.shape
    size = q_latent_BHC.element_size()
    tile = TILE_FEW_HEADS if size == 2 and num_heads <= TILE_FEW_HEADS.heads else TILES[size]
    block_heads = max(16, min(tile.heads, triton.next_power_of_2(num_heads)))
    head_blocks = triton.cdiv(num_heads, block_heads)
    max_length = page_table_BM.shape[1] * pages_PLX.shape[1]
    num_steps = triton.cdiv(max_length, tile.tokens)
    splits = num_splits(num_rows * head_blocks, num_steps, pages_PLX.device)
    part_BHSC, lse_BHS = _pieces(q_latent_BHC, splits)
    mla_decode_kernel[(num_rows * splits * head_blocks,)](
        q_latent_BHC,
        q_rope_BHR,
        pages_PLX,
        page_table_BM,
        lengths_B,
        part_BHSC,
        lse_BHS,
        num_heads,
        *q_latent_BHC.stride()[:2],
        *q_rope_BHR.stride()[:2],
        *pages_PLX.stride()[:2],
        page_table_BM.stride(0),
        max_length,
        scale * math.log2(math.e),
        L=pages_PLX.shape[1],
        C=latent,
        CPAD=max(16, triton.next_power_of_2(latent)),
        R=q_rope_BHR.shape[2],
        RPAD=max(16, triton.next_power_of_2(q_rope_BHR.shape[2])),
        SPLITS=splits,
        BH=block_heads,
        BN=tile.tokens,
        **early_launch(num_rows, pages_PLX.device),
        PRECISION=dot_precision(q_latent_BHC.dtype),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return part_BHSC, lse_BHS


@lru_cache(maxsize=256)
def splits_in_waves(num_programs: int, num_steps: int, processors: int) -> int:
    """Pieces a sequence that take least time where a processor runs one program at a time."""

    def cost(splits: int) -> int:
        waves = triton.cdiv(num_programs * splits, processors)
        return waves * (triton.cdiv(num_steps, splits) + PROGRAM_TILES)

    # More than two waves only add programs.
    most = max(1, min(num_steps, 2 * processors // num_programs))
    return min(range(1, most + 1), key=cost)


def num_splits(num_programs: int, num_steps: int, device: torch.device) -> int:
    """A power of two of pieces a sequence: enough programs for the card, at least a step each."""
    wanted = triton.cdiv(PROGRAMS_PER_PROCESSOR * _processors(device), num_programs)
    return triton.next_power_of_2(max(1, min(wanted, num_steps, MAX_SPLITS)))


@cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def _check(
    q_latent_BHC: Tensor,
    q_rope_BHR: Tensor,
    pages_PLX: Tensor,
    page_table_BM: Tensor,
    lengths_B: Tensor,
) -> None:
    check_floats("mla_decode", q_latent=q_latent_BHC, q_rope=q_rope_BHR, pages=pages_PLX)
    if pages_PLX.shape[-1] != q_latent_BHC.shape[-1] + q_rope_BHR.shape[-1]:
        raise ValueError(
            f"mla_decode: pages hold {pages_PLX.shape[-1]} values a token, the queries need "
            f"{q_latent_BHC.shape[-1]} + {q_rope_BHR.shape[-1]}"
        )
    rows = {len(x) for x in (q_latent_BHC, q_rope_BHR, page_table_BM, lengths_B)}
    if len(rows) > 1 or q_latent_BHC.dtype != q_rope_BHR.dtype:
        raise ValueError(
            f"mla_decode: queries, page table and lengths have {sorted(rows)} rows, the queries "
            f"are {q_latent_BHC.dtype} and {q_rope_BHR.dtype}; use one number and one dtype"
        )
