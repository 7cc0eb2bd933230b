"""The K3 model: packed text model, MTP layer, vision wrapper (architecture 3-5, design 4).

Imported on first use: `k3_core.model.declare` has to be importable without torch.
"""

from typing import TYPE_CHECKING

from k3_core.lazy import lazy_attributes

if TYPE_CHECKING:
    from k3_core.model.batch import SequenceBatch
    from k3_core.model.k3 import K3ForConditionalGeneration
else:
    __getattr__ = lazy_attributes(
        __name__,
        {
            "K3ForConditionalGeneration": "k3_core.model.k3",
            "SequenceBatch": "k3_core.model.batch",
        },
    )

__all__ = ["K3ForConditionalGeneration", "SequenceBatch"]
