"""Data for training: tokenizer, corpus, token files, packed batches (training 4).

The names below are imported on first use: the processes that write a corpus need no torch.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from k3_train.data.sampler import Batch, PackedSampler
    from k3_train.data.token_file import TokenFile, TokenFileWriter

_LAZY = {
    "Batch": "k3_train.data.sampler",
    "PackedSampler": "k3_train.data.sampler",
    "TokenFile": "k3_train.data.token_file",
    "TokenFileWriter": "k3_train.data.token_file",
}

__all__ = ["Batch", "PackedSampler", "TokenFile", "TokenFileWriter"]


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {__all__}")
    return getattr(importlib.import_module(_LAZY[name]), name)
