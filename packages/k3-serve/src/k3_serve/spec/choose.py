"""The drafts by name, and the errors of a name or model that does not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from k3_core.errors import K3Error
from k3_serve.spec.base import Drafter
from k3_serve.spec.ngram import NgramDraft

if TYPE_CHECKING:
    from k3_core.model import K3ForConditionalGeneration

Make = Callable[["K3ForConditionalGeneration", int], Drafter]


def _ngram(model: K3ForConditionalGeneration, num_slots: int) -> Drafter:
    return NgramDraft()


def _mtp(model: K3ForConditionalGeneration, num_slots: int) -> Drafter:
    from k3_serve.spec.mtp import MtpDraft

    return MtpDraft(model, num_slots)


DRAFTS: dict[str, Make] = {"ngram": _ngram, "mtp": _mtp}
"""Name -> how to make the draft for a model and a number of slots."""


def check_draft(name: str) -> None:
    """Raises K3Error for an unknown name."""
    if name not in DRAFTS:
        raise K3Error(f"draft {name!r} is not one of {', '.join(DRAFTS)}; leave it out for none")


def make_drafter(name: str, model: K3ForConditionalGeneration, num_slots: int) -> Drafter:
    """The draft of that name. Raises K3Error for an unknown name or a model without its parts."""
    check_draft(name)
    return DRAFTS[name](model, num_slots)
