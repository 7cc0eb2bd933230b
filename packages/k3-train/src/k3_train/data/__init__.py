"""Data for training: tokenizer, corpus, token files, packed batches (training 4).

The names below are imported on first use: the processes that write a corpus need no torch.
"""

from typing import TYPE_CHECKING

from k3_core.lazy import lazy_attributes

if TYPE_CHECKING:
    from k3_train.data.sampler import Batch, PackedSampler
    from k3_train.data.token_file import TokenFile, TokenFileWriter
else:
    __getattr__ = lazy_attributes(
        __name__,
        {
            "Batch": "k3_train.data.sampler",
            "PackedSampler": "k3_train.data.sampler",
            "TokenFile": "k3_train.data.token_file",
            "TokenFileWriter": "k3_train.data.token_file",
        },
    )

__all__ = ["Batch", "PackedSampler", "TokenFile", "TokenFileWriter"]
