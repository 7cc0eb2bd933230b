"""Sorting 3 to 6 integers of up to 2 digits in ascending order.

Two-digit numbers are two tokens, so the short styles order the tens digits first; the long one
takes the smallest number out of the list again and again.
"""

import random
from dataclasses import dataclass
from typing import ClassVar

from k3_core.tasks.base import Question

WORDINGS = (
    "Sort {numbers}.",
    "Sort these numbers: {numbers}",
    "Put {numbers} in ascending order.",
    "Order from smallest to largest: {numbers}",
)


@dataclass(frozen=True)
class SortQuestion(Question):
    """Ascending order of `numbers`, each 0 to 99, repeats allowed."""

    family: ClassVar[str] = "sort"
    numbers: tuple[int, ...]

    def reasoning(self, effort: str) -> str:
        """low: the tens digits in order; high: numbers by tens digit; max: selection, checked."""
        ordered = sorted(self.numbers)
        if effort == "low":
            return "".join(str(n // 10) for n in ordered)
        if effort == "high":
            groups: dict[int, list[str]] = {}
            for n in ordered:
                groups.setdefault(n // 10, []).append(str(n))
            return "; ".join(f"{tens}: {' '.join(group)}" for tens, group in groups.items())
        left, lines = list(self.numbers), []
        for n in ordered[:-1]:
            lines.append(f"{' '.join(map(str, left))} -> {n}")
            left.remove(n)
        return "\n".join([*lines, f"{left[0]} is last.", f"Check: {len(ordered)} numbers."])


def make(rng: random.Random) -> SortQuestion:
    """Draw a list; every order of the same numbers has the same key."""
    numbers = tuple(rng.randrange(100) for _ in range(rng.randint(3, 6)))
    ordered = ", ".join(map(str, sorted(numbers)))
    prompt = rng.choice(WORDINGS).format(numbers=", ".join(map(str, numbers)))
    return SortQuestion(key=ordered, prompt=prompt, answer=ordered, numbers=numbers)
