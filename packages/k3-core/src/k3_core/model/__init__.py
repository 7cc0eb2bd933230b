"""The K3 model: packed text model, MTP layer, vision wrapper (architecture 3-5, design 4)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from k3_core.model.batch import SequenceBatch
    from k3_core.model.k3 import K3ForConditionalGeneration

__all__ = ["K3ForConditionalGeneration", "SequenceBatch"]


def __getattr__(name: str) -> Any:
    # Lazy, because `k3_core.model.declare` has to be importable without torch.
    if name == "K3ForConditionalGeneration":
        from k3_core.model.k3 import K3ForConditionalGeneration

        return K3ForConditionalGeneration
    if name == "SequenceBatch":
        from k3_core.model.batch import SequenceBatch

        return SequenceBatch
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
