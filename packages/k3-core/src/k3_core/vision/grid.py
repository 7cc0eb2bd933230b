"""Patch grids of images and video chunks, checked before any tensor is touched.

An item (one image, or one chunk of video frames) is a grid of t frames by h rows by w columns
of patches. Source: architecture 5 (at most 4 frames and 512 x 512 patches an item).
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from k3_core.errors import K3Error

MAX_GRID_SIDE = 512


class VisionInputError(K3Error, ValueError):
    """Pixel values, grids or placeholders that do not fit each other or the model."""


class Grid(NamedTuple):
    """Frames, rows and columns of the patches of one item."""

    t: int
    h: int
    w: int

    @property
    def num_patches(self) -> int:
        """Patches of the item, rows of `pixel_values`."""
        return self.t * self.h * self.w

    def num_tokens(self, merge_kernel_size: Sequence[int]) -> int:
        """Positions of the item in the text: frames are averaged, neighbours are merged."""
        rows, columns = merge_kernel_size
        return (self.h // rows) * (self.w // columns)


def read_grids(
    grid_thws_N3: Tensor,
    *,
    num_patches: int,
    merge_kernel_size: Sequence[int],
    max_frames: int,
) -> tuple[Grid, ...]:
    """The checked grids of `grid_thws_N3` (integers, on any device; read to the host).

    Raises `VisionInputError` for a wrong shape, more than `max_frames` frames, a side that is
    no multiple of the merge kernel or above 512, or grids that do not cover `num_patches`.
    """
    if grid_thws_N3.ndim != 2 or grid_thws_N3.shape[1] != 3 or grid_thws_N3.is_floating_point():
        raise VisionInputError(
            f"grid_thws has shape {list(grid_thws_N3.shape)} and dtype {grid_thws_N3.dtype}; "
            "pass an integer tensor [num_items, 3] of (frames, rows, columns) in patches"
        )
    grids = tuple(Grid(*row) for row in grid_thws_N3.tolist())
    if not grids:
        raise VisionInputError("grid_thws has no rows; leave images out when there are none")
    for index, grid in enumerate(grids):
        _check_grid(index, grid, merge_kernel_size, max_frames)
    expected = sum(grid.num_patches for grid in grids)
    if expected != num_patches:
        raise VisionInputError(
            f"pixel_values has {num_patches} patches but grid_thws {[tuple(g) for g in grids]} "
            f"cover {expected}; pass the patches of exactly these items, in order"
        )
    return grids


def _check_grid(index: int, grid: Grid, merge_kernel_size: Sequence[int], max_frames: int) -> None:
    if not 1 <= grid.t <= max_frames:
        raise VisionInputError(
            f"item {index} has {grid.t} frames; allowed are 1 to {max_frames}: "
            "cut longer videos into chunks, one item each"
        )
    for side, size, kernel in zip("hw", grid[1:], merge_kernel_size, strict=True):
        if not 1 <= size <= MAX_GRID_SIDE or size % kernel:
            raise VisionInputError(
                f"item {index} has {side} = {size} patches; allowed are multiples of {kernel} "
                f"from {kernel} to {MAX_GRID_SIDE}: pad or scale the image first"
            )
