"""The suite `long_context`: questions of `k3_train.data.long_context` at growing lengths.

The form is that of training on them: `[BOS]` prompt, answer, `[EOS]`, without a chat. An answer is
right when the first line of the greedy continuation is exactly it. Where the family has wrong
answers of the same form, the right one is also ranked among them by log-probability, `[EOS]`
included.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from k3_core.config import ConfigError
from k3_core.errors import K3Error
from k3_train.data.long_context import FAMILIES, Item, draw_item
from k3_train.evaluate.base import Result, Subject, Wanted, accuracy, check_families
from k3_train.evaluate.intervals import ratio
from k3_train.evaluate.scoring import greedy_lines, joined, score

NUM_ITEMS = 20
ANSWER_TOKENS = 32
"""Kept free at the end of a length for the answer; four codes by bytes, with `[EOS]`."""
SHARES = (0.125, 0.25, 0.5, 1.0)
BY_DEPTH = "needle"
"""The family whose one fact is put at every depth."""


@dataclass(frozen=True)
class LongContextSuite:
    """Options of the suite `long_context`.

    families: empty for all. lengths: of prompt and answer together, in tokens; empty takes an
    eighth, a quarter, a half and all of the model's context. depths: places of the needle's fact,
    from 0, the beginning of the text, to 1.
    """

    families: tuple[str, ...] = ()
    lengths: tuple[int, ...] = ()
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)

    def __post_init__(self) -> None:
        check_families("long_context.families", self.families, FAMILIES)
        if not self.depths or not all(0 <= depth <= 1 for depth in self.depths):
            raise ConfigError(
                "long_context.depths", f"{self.depths} are not all in 0..1", "Give at least one."
            )

    def measure(self, subject: Subject, wanted: Wanted) -> Iterator[Result]:
        """By family and length, and for the needle by depth too; all cells have as many items.

        K3Error for a length that was asked for and does not hold a family's facts; a share of the
        context that is too short is left out, all of it is not.
        """
        context = subject.context
        lengths = self.lengths or tuple(int(share * context) for share in SHARES)
        for family in self.families or FAMILIES:
            for length in lengths:
                for depth in self.depths if family == BY_DEPTH else (None,):
                    cell = f"{wanted.seed}:{family}:{length}:{depth}"
                    count = wanted.limit or NUM_ITEMS
                    try:
                        items = draw_items(subject, family, length, depth, count, cell)
                    except K3Error:
                        if self.lengths or length == context:
                            raise
                        continue
                    yield from _results(subject, items, length, depth)


def draw_items(
    subject: Subject, family: str, length: int, depth: float | None, count: int, cell: str
) -> list[Item]:
    """`count` items whose prompts leave room for `[BOS]` and an answer; `cell` seeds them."""

    def num_tokens(text: str) -> int:
        return len(subject.tokenizer.encode(text))

    room = length - 1 - ANSWER_TOKENS
    rngs = (random.Random(f"evaluate:{cell}:{number}") for number in range(count))
    return [draw_item(family, room, rng, count=num_tokens, depth=depth) for rng in rngs]


def _results(
    subject: Subject, items: Sequence[Item], length: int, depth: float | None
) -> Iterator[Result]:
    family, count = items[0].family, len(items)
    conditions: dict[str, float | str] = {"length": length}
    if depth is not None:
        conditions["depth"] = depth
    lines = greedy_lines(subject, [item.prompt for item in items], ANSWER_TOKENS)
    right = sum(line == item.answer for line, item in zip(lines, items, strict=True))
    yield accuracy(family, right, count, conditions=conditions)
    if not any(item.distractors for item in items):
        return
    ranks = [rank(subject, item) for item in items]
    choices = 1 + max(len(item.distractors) for item in items)
    conditions = {**conditions, "choices": choices}
    first = sum(one == 1 for one in ranks)
    yield accuracy(family, first, count, metric="choice_accuracy", conditions=conditions)
    value, low, high = ratio(ranks, [1] * count)
    if low is not None and high is not None:
        low, high = max(1.0, low), min(float(choices), high)
    yield Result(family, "mean_rank", value, count, low, high, conditions=conditions)


def rank(subject: Subject, item: Item) -> int:
    """1 when the answer is likelier than every distractor; an equal one counts as likelier."""
    pieces = joined(subject, item.prompt, [item.answer, *item.distractors], is_ended=True)
    own, *others = (one.logprob for one in score(subject, pieces))
    return 1 + sum(other >= own for other in others)
