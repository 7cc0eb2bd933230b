"""The projector from merged vision features to text width (architecture 5, step 5).

Legend: M merged positions, C = merge rows * columns * vision width, D text width.
"""

from typing import Any

import torch
from torch import Tensor, nn

from k3_core.config import VisionConfig
from k3_core.modules import Linear
from k3_core.vision.tower import Collected, VisionTower, note


class Projector(nn.Module):
    """Linear, GELU (erf), Linear, RMSNorm over the text width; no biases."""

    def __init__(
        self,
        config: VisionConfig,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        inner, width = config.merged_size, config.text_hidden_size
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.proj = nn.Sequential(
            Linear(inner, inner, **factory), nn.GELU(), Linear(inner, width, **factory)
        )
        self.post_norm = nn.RMSNorm(width, eps=config.projector_ln_eps, **factory)

    def forward(self, merged_MC: Tensor) -> Tensor:
        """Features [M, D] that take the place of the placeholders' embeddings."""
        return self.post_norm(self.proj(merged_MC))


def encode_images(
    tower: VisionTower,
    projector: Projector,
    pixel_values_P3HW: Tensor,
    grid_thws_N3: Tensor,
    collect: Collected | None = None,
) -> list[Tensor]:
    """Features [n_i, D] of every item, in the order of `grid_thws_N3`.

    `collect`, when given, receives the tower's intermediates and `projected`.
    """
    merged_MC, lengths = tower(pixel_values_P3HW, grid_thws_N3, collect)
    projected_MD = projector(merged_MC)
    note(collect, "projected", projected_MD)
    return list(projected_MD.split(lengths))
