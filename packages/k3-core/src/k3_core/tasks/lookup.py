"""Looking up one key among 4 to 10 random key-value pairs in the prompt."""

import random
from dataclasses import dataclass
from typing import ClassVar

from k3_core.tasks.base import Question
from k3_core.tasks.words import draw_keys, draw_values

LETTERS = 0.15
WORDINGS = (
    "Pairs: {pairs}. What is the value of {asked}?",
    "Here are some pairs: {pairs}. Find {asked}.",
    "Given {pairs}, what is {asked}?",
    "Find {asked} in this list: {pairs}.",
)


@dataclass(frozen=True)
class LookupQuestion(Question):
    """The value of `asked` among `pairs`, whose keys differ."""

    family: ClassVar[str] = "lookup"
    pairs: tuple[tuple[str, str], ...]
    asked: str

    def reasoning(self, effort: str) -> str:
        """low: nothing; high: the pair; max: goes through the list up to the key, and checks."""
        found = f"{self.asked}: {self.answer}"
        if effort == "low":
            return ""
        if effort == "high":
            return f"The pair is {found}."
        position = [key for key, _ in self.pairs].index(self.asked)
        passed = "".join(f" {key} no," for key, _ in self.pairs[:position])
        return f"Asked for {self.asked}.\nScan:{passed} {self.asked} yes.\nCheck: {found}."


def make(rng: random.Random) -> LookupQuestion:
    """Draw pairs and a key; the pairs in any order with the same asked key share their split."""
    count = rng.randint(4, 10)
    pairs = tuple(zip(draw_keys(rng, count, LETTERS), draw_values(rng, count), strict=True))
    asked, answer = rng.choice(pairs)
    prompt = rng.choice(WORDINGS).format(
        pairs=", ".join(f"{key}: {value}" for key, value in pairs), asked=asked
    )
    key = f"{asked}|{','.join(f'{k}:{v}' for k, v in sorted(pairs))}"
    return LookupQuestion(key=key, prompt=prompt, answer=answer, pairs=pairs, asked=asked)
