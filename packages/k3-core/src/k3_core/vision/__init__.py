"""Vision: MoonViT-V2, its projector, and image features merged into text (architecture 5)."""

from k3_core.vision.grid import Grid, VisionInputError
from k3_core.vision.merge import (
    Expansion,
    MergedBatch,
    expand_ids,
    expand_labels,
    expand_placeholders,
    fill_placeholders,
    merge_batch,
    split_items,
)
from k3_core.vision.projector import Projector, encode_images
from k3_core.vision.tower import VisionTower

__all__ = [
    "Expansion",
    "Grid",
    "MergedBatch",
    "Projector",
    "VisionInputError",
    "VisionTower",
    "encode_images",
    "expand_ids",
    "expand_labels",
    "expand_placeholders",
    "fill_placeholders",
    "merge_batch",
    "split_items",
]
