"""From the name of a model to an engine that answers (report 5.4)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from k3_core.engine.simple import SimpleEngine
    from k3_core.model import K3ForConditionalGeneration
    from k3_core.tokenizer import K3Tokenizer


def load_model(
    name: str, *, device: str = "cpu", dtype: str = "float32", experts: str = "packed"
) -> tuple[K3ForConditionalGeneration, K3Tokenizer]:
    """The model and tokenizer of a model folder or a bundled model such as k3-nano.

    `experts` "packed" takes the least memory, "dequantized" is not decoded in calls. Raises
    what loading raises: K3Error for bad options and for a missing or damaged model.
    """
    from k3_core.checkpoint.source import resolve_source
    from k3_core.model import K3ForConditionalGeneration
    from k3_core.tokenizer import K3Tokenizer

    folder = resolve_source(name)
    model = K3ForConditionalGeneration.from_pretrained(
        folder, dtype=dtype, device=device, experts=experts
    )
    return model, K3Tokenizer.from_pretrained(folder)


def load_engine(
    name: str,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    experts: str = "packed",
    max_batch: int = 8,
) -> tuple[SimpleEngine, K3Tokenizer]:
    """The simple engine over `load_model`, and the tokenizer."""
    from k3_core.engine.simple import SimpleEngine

    model, tokenizer = load_model(name, device=device, dtype=dtype, experts=experts)
    return SimpleEngine(model, tokenizer, max_batch=max_batch), tokenizer
