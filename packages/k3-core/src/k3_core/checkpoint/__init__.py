"""Checkpoints in the released layout: sharded safetensors, MXFP4 experts (architecture 2).

Headers are read without torch; torch comes in with the first of the functions below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from k3_core.lazy import lazy_attributes

from .folder import CheckpointFolder
from .headers import CheckpointError

if TYPE_CHECKING:
    from .load import load_pretrained
    from .save import save_pretrained
else:
    __getattr__ = lazy_attributes(
        __name__,
        {
            "load_pretrained": f"{__name__}.load",
            "save_pretrained": f"{__name__}.save",
        },
    )

__all__ = ["CheckpointError", "CheckpointFolder", "load_pretrained", "save_pretrained"]
