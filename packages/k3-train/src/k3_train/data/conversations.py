"""Random training conversations in the chat format, made of train-split questions.

A conversation has one to four questions, of one family or mixed, and one thinking effort; a few
are in instruct mode, where nothing is thought (architecture 8).
"""

import random
from dataclasses import dataclass
from typing import Any

from k3_core.tasks import EFFORTS, Message, draw

# Sorting and sums need the most examples, a tool call the fewest.
FAMILY_WEIGHTS = {"sum": 0.3, "sort": 0.3, "lookup": 0.25, "tool_lookup": 0.15}
NUM_QUESTIONS_WEIGHTS = {1: 0.5, 2: 0.2, 3: 0.2, 4: 0.1}
MIXED = 0.5
INSTRUCT = 0.05


@dataclass(frozen=True)
class Conversation:
    """What the chat renderer takes; `effort` is None exactly in instruct mode."""

    families: tuple[str, ...]
    messages: list[Message]
    tools: list[dict[str, Any]] | None
    effort: str | None

    @property
    def thinking(self) -> bool:
        """Whether the assistant has a think channel."""
        return self.effort is not None


def draw_conversation(rng: random.Random) -> Conversation:
    """Draw one conversation; all its questions are of the train split."""
    (count,) = _choose(rng, NUM_QUESTIONS_WEIGHTS, 1)
    is_mixed = rng.random() < MIXED
    families = _choose(rng, FAMILY_WEIGHTS, count if is_mixed else 1) * (1 if is_mixed else count)
    effort = rng.choice(EFFORTS)
    messages: list[Message] = []
    tools: dict[str, dict[str, Any]] = {}
    for family in families:
        question = draw(family, rng, "train")
        messages += question.training_messages(effort)
        tools |= {tool["function"]["name"]: tool for tool in question.tools or ()}
    return Conversation(
        families=tuple(families),
        messages=messages,
        tools=list(tools.values()) or None,
        effort=None if rng.random() < INSTRUCT else effort,
    )


def _choose(rng: random.Random, weights: dict[Any, float], count: int) -> list[Any]:
    return rng.choices(tuple(weights), weights=tuple(weights.values()), k=count)
