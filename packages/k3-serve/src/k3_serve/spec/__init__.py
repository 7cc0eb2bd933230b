"""Speculative decoding: drafts that a forward verifies without changing an answer (report 5.4)."""

from k3_serve.spec.base import Drafter, Pass
from k3_serve.spec.choose import DRAFTS, make_drafter
from k3_serve.spec.ngram import NgramDraft
from k3_serve.spec.speculation import MAX_REQUESTS, Speculation

__all__ = [
    "DRAFTS",
    "MAX_REQUESTS",
    "Drafter",
    "NgramDraft",
    "Pass",
    "Speculation",
    "make_drafter",
]
