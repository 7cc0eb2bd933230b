"""Positions of patches: learned grid, frame sinusoid and 2D rotary angles (architecture 5).

Legend: P patches of all items, N patches of one item, D vision width, H heads, K head width,
R = K / 2 rotated pairs.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from k3_core.vision.grid import Grid

THETA = 10000.0


def frame_sinusoid(num_frames: int, width: int) -> Tensor:
    """Fixed position [num_frames, width] of frames 0.., float64: sines first, then cosines."""
    half = width // 2
    exponent_D = torch.arange(half, dtype=torch.float64) / half
    angle_TD = torch.arange(num_frames, dtype=torch.float64)[:, None] * THETA**-exponent_D
    return torch.cat((angle_TD.sin(), angle_TD.cos()), dim=1)


class GridPosition(nn.Module):
    """Learned position grid `weight` [rows, columns, D], resized to each item's grid."""

    def __init__(
        self,
        rows: int,
        columns: int,
        width: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns, width, device=device, dtype=dtype))

    def forward(self, grids: Sequence[Grid]) -> Tensor:
        """Positions [P, D] of all items, frame after frame, row after row."""
        return torch.cat([self._item(grid) for grid in grids])

    def _item(self, grid: Grid) -> Tensor:
        grid_HWD: Tensor = self.weight
        if (grid.h, grid.w) != tuple(self.weight.shape[:2]):
            source_1DHW = self.weight.permute(2, 0, 1)[None]
            resized_1DHW = F.interpolate(
                source_1DHW, size=(grid.h, grid.w), mode="bilinear", align_corners=False
            )
            grid_HWD = resized_1DHW[0].permute(1, 2, 0)
        frame_ND = grid_HWD.flatten(0, 1)
        if grid.t == 1:  # a still image gets no frame term, not even that of frame 0
            return frame_ND
        time_TD = frame_sinusoid(grid.t, frame_ND.shape[1]).to(frame_ND)
        return (frame_ND[None] + time_TD[:, None]).flatten(0, 1)


def rotary_angles(
    grids: Sequence[Grid], head_dim: int, *, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [P, R] of all patches in `dtype`, float32 or float64.

    Pair 2i turns with the column, pair 2i + 1 with the row, by position * 10000^(-4i / K);
    every frame repeats the same angles.
    """
    step = torch.arange(0, head_dim, 4, device=device, dtype=dtype) / head_dim
    frequency = THETA**-step
    angles = []
    for grid in grids:
        row_N, column_N = _row_column(grid, device)
        pairs = torch.stack((column_N, row_N), dim=1).to(dtype)  # [N, 2]
        angle_NR = (frequency[None, :, None] * pairs[:, None, :]).flatten(1)
        angles.append(angle_NR.repeat(grid.t, 1))
    angle_PR = torch.cat(angles)
    return angle_PR.cos(), angle_PR.sin()


def _row_column(grid: Grid, device: torch.device) -> tuple[Tensor, Tensor]:
    index_N = torch.arange(grid.h * grid.w, device=device)
    return index_N // grid.w, index_N % grid.w


def rotate(x_PHK: Tensor, cos_PR: Tensor, sin_PR: Tensor) -> Tensor:
    """Turns the interleaved pairs of every head in the angles' dtype; result in x's dtype."""
    even_PHR, odd_PHR = x_PHK.to(cos_PR.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    cos_P1R, sin_P1R = cos_PR[:, None], sin_PR[:, None]
    turned = torch.stack(
        (even_PHR * cos_P1R - odd_PHR * sin_P1R, even_PHR * sin_P1R + odd_PHR * cos_P1R), dim=-1
    )
    return turned.flatten(-2).to(x_PHK.dtype)
