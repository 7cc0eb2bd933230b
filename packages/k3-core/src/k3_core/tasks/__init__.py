"""Question families that the bundled model is trained on and measured with (issue item 10).

Each family has one file. `draw` gives a question of the train or the test part; nothing here
imports torch.
"""

import random
from collections.abc import Callable

from k3_core.errors import K3Error
from k3_core.tasks import lookup, sort, sums, tool_lookup
from k3_core.tasks.base import EFFORTS, SPLITS, Message, Question, draw_until, is_test

_MAKERS: dict[str, Callable[[random.Random], Question]] = {
    "sum": sums.make,
    "sort": sort.make,
    "lookup": lookup.make,
    "tool_lookup": tool_lookup.make,
}
FAMILIES = tuple(_MAKERS)

__all__ = ["EFFORTS", "FAMILIES", "SPLITS", "Message", "Question", "check", "draw", "is_test"]


def draw(family: str, rng: random.Random, split: str = "train") -> Question:
    """A random question of `family` from the `split` part."""
    if family not in _MAKERS:
        raise K3Error(f"family {family!r} is not one of {', '.join(FAMILIES)}: pass one of them")
    return draw_until(_MAKERS[family], rng, split)


def check(question: Question, text: str) -> bool:
    """Whether `text` answers `question`."""
    return question.check(text)
