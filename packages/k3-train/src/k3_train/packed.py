"""A batch of the sampler as the model takes it, on its device."""

import torch
from torch import Tensor

from k3_core.image.preprocess import normalized
from k3_core.model.batch import PackedImages, SequenceBatch
from k3_train.data.sampler import Batch


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device, without waiting for a copy to a GPU."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor


def packed(batch: Batch, device: torch.device) -> SequenceBatch:
    """The sequences and pictures of a batch; its ids and labels are not in it."""
    images = None
    if batch.images is not None:
        pixels = normalized(to_device(batch.images.patches, device))
        images = PackedImages(pixels, batch.images.grids)
    return SequenceBatch.from_lengths(batch.seqlens, device=device, images=images)
