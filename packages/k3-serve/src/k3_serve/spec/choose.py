"""The drafts by name, and the errors of a name or model that does not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from k3_core.errors import K3Error
from k3_serve.spec.base import Drafter
from k3_serve.spec.ngram import NgramDraft

if TYPE_CHECKING:
    from k3_core.config import K3Config
    from k3_core.model import K3ForConditionalGeneration

Make = Callable[["K3ForConditionalGeneration", int], Drafter]


def _ngram(model: K3ForConditionalGeneration, num_slots: int) -> Drafter:
    return NgramDraft()


def _mtp(model: K3ForConditionalGeneration, num_slots: int) -> Drafter:
    from k3_serve.spec.mtp import MtpDraft

    return MtpDraft(model, num_slots)


DRAFTS: dict[str, Make] = {"ngram": _ngram, "mtp": _mtp}
"""Name -> how to make the draft for a model and a number of slots."""


def check_draft(name: str, config: K3Config) -> None:
    """Raises K3Error for an unknown name, and for a model without what the draft needs."""
    if name not in DRAFTS:
        raise K3Error(f"draft {name!r} is not one of {', '.join(DRAFTS)}; leave it out for none")
    num_layers = config.text.num_nextn_predict_layers
    if name == "mtp" and not num_layers:
        raise K3Error(
            f"num_nextn_predict_layers is {num_layers}: the model has no MTP layer to draft with; "
            "take draft ngram, or none"
        )


def make_drafter(name: str, model: K3ForConditionalGeneration, num_slots: int) -> Drafter:
    """The draft of that name; K3Error as `check_draft` says."""
    check_draft(name, model.config)
    return DRAFTS[name](model, num_slots)
