"""K3: registry, model, ops, checkpoint, tokenizer and protocols.

The names below are imported on first use, so that `import k3_core` imports no torch.
"""

import importlib
from typing import TYPE_CHECKING

from k3_core.__about__ import __version__

if TYPE_CHECKING:
    from k3_core.config import K3Config
    from k3_core.model import K3ForConditionalGeneration
    from k3_core.tokenizer import K3Tokenizer

_LAZY = {
    "K3Config": "k3_core.config",
    "K3ForConditionalGeneration": "k3_core.model",
    "K3Tokenizer": "k3_core.tokenizer",
}

__all__ = ["K3Config", "K3ForConditionalGeneration", "K3Tokenizer", "__version__"]


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module 'k3_core' has no attribute {name!r}; it has {__all__}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
