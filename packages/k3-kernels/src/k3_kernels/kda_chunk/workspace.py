"""Memory that the KDA kernels hand on to each other, of the chunks of a slab or of a whole call.

Legend: H heads, K key, V value channels, C chunks, J segments, R, L: V and K rounded up to a power
of two, X what a chunk and head have in the workspace.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from k3_kernels.kda_chunk.config import Blocks, Precision, block_width


class Tiles(NamedTuple):
    """The workspace of a slab: what prep.py lists, side by side for each chunk and head."""

    tile_CHX: Tensor
    vector_CHX: Tensor


class Maps(NamedTuple):
    """Affine maps of pieces; see scan.py. kept: 0 where map is zero, None where nothing forgets."""

    map_JHKK: Tensor
    shift_JHVK: Tensor
    kept_JH: Tensor | None


class Kept(NamedTuple):
    """What a scan for the backward keeps of the chunks of a slab (scan.py); R, L: V and K rounded
    up, C chunks, T tokens of a chunk."""

    state_CHRL: Tensor
    delta_CHRT: Tensor


Workspaces = TypeVar("Workspaces", Tiles, Kept)


class Record(NamedTuple):
    """What a forward saves of all chunks for its backward; has_bound: whether that needs prep's
    bounds."""

    tiles: Tiles
    kept: Kept | None
    has_bound: bool


def tile_sizes(num_k: int, has_reads: bool, blocks: Blocks) -> tuple[int, int]:
    """Operands and float32 numbers in the workspace of a chunk and head."""
    chunk, width = blocks.chunk, block_width(num_k)
    size = (3 if has_reads else 2) * chunk * width + (2 if has_reads else 1) * chunk * chunk
    # The bound is one number; rows stay aligned.
    return size, width + 2 * chunk + 16


def chunk_bytes(
    state_shape: tuple[int, ...], blocks: Blocks, precision: Precision
) -> tuple[int, int, int]:
    """Of a chunk and head: tiles; states and deltas; one of the states."""
    size, num_floats = tile_sizes(state_shape[2], True, blocks)
    rows, width = map(block_width, state_shape[1:])
    item = precision.operand.itemsize
    tiles, kept = size * item + num_floats * 4, rows * (width + blocks.chunk) * item
    return tiles, kept, rows * width * item


def make_tiles(
    device: torch.device,
    num_heads: int,
    num_k: int,
    num_chunks: int,
    has_reads: bool,
    blocks: Blocks,
    precision: Precision,
) -> Tiles:
    """A workspace; without reads it has no room for the last two tiles."""
    size, num_floats = tile_sizes(num_k, has_reads, blocks)
    shape = (num_chunks, num_heads)
    tiles = torch.empty(*shape, size, dtype=precision.operand, device=device)
    vectors = torch.empty(*shape, num_floats, dtype=torch.float32, device=device)
    return Tiles(tiles, vectors)


def make_kept(
    device: torch.device,
    state_shape: tuple[int, ...],
    num_chunks: int,
    blocks: Blocks,
    precision: Precision,
) -> Kept:
    """Room for what a scan keeps; state_shape: [H, V, K]."""
    num_heads, rows, width = state_shape[0], *map(block_width, state_shape[1:])
    sizes = ((rows, width), (rows, blocks.chunk))
    return Kept(
        *(
            torch.empty(num_chunks, num_heads, *size, dtype=precision.operand, device=device)
            for size in sizes
        )
    )


def cut_chunks_of(whole: Workspaces, counts: list[int]) -> list[Workspaces]:
    """Tiles, or what was kept, of consecutive slabs of so many chunks."""
    parts = zip(*(x.split(counts) for x in whole), strict=True)
    return [type(whole)(*part) for part in parts]


def make_maps(shape: tuple[int, int, int, int], can_forget: bool, device: torch.device) -> Maps:
    """Room for the maps of J pieces; shape: J, H, V, K."""
    num_maps, num_heads, num_v, num_k = shape
    sizes = ((num_heads, num_k, num_k), (num_heads, num_v, num_k))
    maps, shifts = (
        torch.empty(num_maps, *size, dtype=torch.float32, device=device) for size in sizes
    )
    kept = torch.empty(num_maps, num_heads, dtype=torch.int32, device=device)
    return Maps(maps, shifts, kept if can_forget else None)
