"""Initial weights of the vision tower and the projector.

Neither the report nor the released code says how MoonViT-V2 was initialised. Ours follows the
text model's `initializer_range`: normal with deviation 0.02 for matrices and for the position
grid, ones for norms.
"""

import torch
from torch import nn


@torch.no_grad()
def init_vision_weights(
    module: nn.Module, std: float = 0.02, generator: torch.Generator | None = None
) -> None:
    """Fills every parameter below `module`: norms with 1, all others from normal(0, `std`)."""
    for child in module.modules():
        for parameter in child.parameters(recurse=False):
            if isinstance(child, nn.RMSNorm):
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, std, generator=generator)
