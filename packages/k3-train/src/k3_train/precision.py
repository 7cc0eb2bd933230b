"""The precision of training."""

from contextlib import AbstractContextManager, nullcontext

import torch


def training_precision(device: torch.device) -> AbstractContextManager[object]:
    """A block in bf16 matrices over fp32 parameters on a GPU, in fp32 on a CPU."""
    if device.type == "cuda":
        return torch.autocast("cuda", torch.bfloat16)
    return nullcontext()
