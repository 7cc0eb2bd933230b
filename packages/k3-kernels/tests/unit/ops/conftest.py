"""What tests of several kernels share."""

import pytest
import torch


@pytest.fixture
def small_expert_tiles(monkeypatch):
    """Experts of several tiles, tiles of several paddings, more than one step: where kernels are
    interpreted, a third of the time as well."""
    if torch.cuda.is_available():
        return
    from k3_kernels.moe_experts import products, rows

    tile = products.Tile(32, 16, 4, 2)
    tiles = products.Tiles(32, tile, tile, tile, tile, 16, tile)
    monkeypatch.setattr(products, "FULL", tiles)
    monkeypatch.setattr(products, "HALF", tiles)
    monkeypatch.setattr(rows, "PAD", 16)
