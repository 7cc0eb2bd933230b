"""Checkpoints in the released layout: sharded safetensors, MXFP4 experts (architecture 2).

Headers are read without torch; torch comes in with the first of the functions below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .folder import CheckpointFolder
from .headers import CheckpointError

if TYPE_CHECKING:
    from .load import load_pretrained
    from .save import save_pretrained

__all__ = ["CheckpointError", "CheckpointFolder", "load_pretrained", "save_pretrained"]


def __getattr__(name: str) -> Any:
    if name == "load_pretrained":
        from .load import load_pretrained

        return load_pretrained
    if name == "save_pretrained":
        from .save import save_pretrained

        return save_pretrained
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {__all__}")
