"""K3: registry, model, ops, checkpoint, tokenizer and protocols.

The names below are imported on first use, so that `import k3_core` imports no torch.
"""

from typing import TYPE_CHECKING

from k3_core.__about__ import __version__
from k3_core.lazy import lazy_attributes

if TYPE_CHECKING:
    from k3_core.config import K3Config
    from k3_core.model import K3ForConditionalGeneration
    from k3_core.tokenizer import K3Tokenizer
else:
    __getattr__ = lazy_attributes(
        __name__,
        {
            "K3Config": "k3_core.config",
            "K3ForConditionalGeneration": "k3_core.model",
            "K3Tokenizer": "k3_core.tokenizer",
        },
    )

__all__ = ["K3Config", "K3ForConditionalGeneration", "K3Tokenizer", "__version__"]
