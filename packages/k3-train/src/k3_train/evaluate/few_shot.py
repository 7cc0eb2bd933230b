"""The suite `few_shot`: small generated tasks in plain text, for models without a chat format.

A prompt is a few solved examples and one that is not solved; the first line of the greedy
continuation has to be exactly its answer.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from k3_core.config import ConfigError
from k3_core.errors import K3Error
from k3_core.tasks.words import KEYS
from k3_train.evaluate.base import Result, Subject, Wanted, accuracy, check_families
from k3_train.evaluate.scoring import greedy_lines

NUM_ITEMS = 100
MAX_DRAWS = 200
PAIRS = {"(": ")", "[": "]", "{": "}"}
Example = tuple[str, str]
"""A question and its answer."""


@dataclass(frozen=True)
class FewShotSuite:
    """Options of the suite `few_shot`.

    families: empty for all. shots: solved examples in a prompt. size: digits, words, numbers or
    brackets of a question. max_tokens: of an answer.
    """

    families: tuple[str, ...] = ()
    shots: int = 4
    size: int = 3
    max_tokens: int = 32

    def __post_init__(self) -> None:
        check_families("few_shot.families", self.families, FAMILIES)
        if self.shots < 0 or not 1 <= self.size <= len(KEYS):
            raise ConfigError(
                "few_shot.size",
                f"shots {self.shots} and size {self.size} are not possible",
                f"Give 0 shots or more and a size in 1..{len(KEYS)}.",
            )

    def measure(self, subject: Subject, wanted: Wanted) -> Iterator[Result]:
        """Accuracy by family."""
        count = wanted.limit or NUM_ITEMS
        for family in self.families or FAMILIES:
            items = self.draw(family, count, wanted.seed)
            lines = greedy_lines(subject, [prompt for prompt, _ in items], self.max_tokens)
            right = sum(line == item[1] for line, item in zip(lines, items, strict=True))
            conditions = {"shots": self.shots, "size": self.size}
            yield accuracy(family, right, count, conditions=conditions)

    def draw(self, family: str, count: int, seed: int) -> list[Example]:
        """`count` prompts with their answers; the questions of one prompt differ."""
        rng = random.Random(f"few_shot:{seed}:{family}")
        return [self._prompt(family, rng) for _ in range(count)]

    def _prompt(self, family: str, rng: random.Random) -> Example:
        examples: dict[str, str] = {}
        for _ in range(MAX_DRAWS):
            question, answer = FAMILIES[family](rng, self.size)
            examples.setdefault(question, answer)
            if len(examples) > self.shots:
                *shown, asked = (f"Input: {one}\nOutput:" for one in examples)
                *known, wanted = examples.values()
                solved = (f"{a} {b}\n\n" for a, b in zip(shown, known, strict=True))
                return "".join([*solved, asked]), wanted
        raise K3Error(
            f"few_shot: {family} of size {self.size} has no {self.shots + 1} different questions; "
            "ask for a larger size or fewer shots"
        )


def _add(rng: random.Random, size: int) -> Example:
    a, b = (rng.randrange(10**size) for _ in range(2))
    return f"{a} + {b}", str(a + b)


def _sort(rng: random.Random, size: int) -> Example:
    numbers = [rng.randrange(100) for _ in range(size)]
    return "sort " + " ".join(map(str, numbers)), " ".join(map(str, sorted(numbers)))


def _copy(rng: random.Random, size: int) -> Example:
    words = " ".join(rng.sample(KEYS, size))
    return f"copy {words}", words


def _reverse(rng: random.Random, size: int) -> Example:
    words = rng.sample(KEYS, size)
    return "reverse " + " ".join(words), " ".join(reversed(words))


def _brackets(rng: random.Random, size: int) -> Example:
    """Opened, and now and then closed again; asked for what closes the rest."""
    written: list[str] = []
    waiting: list[str] = []
    while len(waiting) < size:
        if waiting and rng.random() < 0.3:
            written.append(waiting.pop())
        else:
            opened = rng.choice("([{")
            written.append(opened)
            waiting.append(PAIRS[opened])
    return "close " + " ".join(written), " ".join(reversed(waiting))


FAMILIES: dict[str, Callable[[random.Random, int], Example]] = {
    "add": _add,
    "sort": _sort,
    "copy": _copy,
    "reverse": _reverse,
    "brackets": _brackets,
}
