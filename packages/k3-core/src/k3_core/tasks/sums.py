"""Sums of two integers of 1 to 3 digits, column by column from the ones digit.

A left-to-right answer needs every carry at its first digit. The think channel therefore gives the
column totals from the right (carry in included), so that each step looks at two digits and the
total before it; the response then copies the digits in reverse.
"""

import random
from dataclasses import dataclass
from typing import ClassVar

from k3_core.tasks.base import Question

COLUMNS = ("Ones", "Tens", "Hundreds")
WORDINGS = (
    "What is {a} + {b}?",
    "Add {a} and {b}.",
    "Compute {a} + {b}.",
    "What is the sum of {a} and {b}?",
    "{a} + {b} = ?",
)


@dataclass(frozen=True)
class SumQuestion(Question):
    """a + b, with 0 <= a, b <= 999."""

    family: ClassVar[str] = "sum"
    a: int
    b: int

    def columns(self) -> list[tuple[int, int, int, int]]:
        """(digit of a, digit of b, carry in, total) of each column from the ones digit."""
        rows, carry = [], 0
        for place in range(max(len(str(self.a)), len(str(self.b)))):
            digit_a, digit_b = (n // 10**place % 10 for n in (self.a, self.b))
            total = digit_a + digit_b + carry
            rows.append((digit_a, digit_b, carry, total))
            carry = total // 10
        return rows

    def reasoning(self, effort: str) -> str:
        """low: column totals; high: with their terms; max: in words, and checked."""
        rows = self.columns()
        if effort == "low":
            return " ".join(str(total) for *_, total in rows)
        terms = [f"{a}+{b}{'+1' if carry else ''}={total}" for a, b, carry, total in rows]
        if effort == "high":
            return ", ".join(terms)
        lines: list[str] = []
        for name, term, (*_, total) in zip(COLUMNS, terms, rows, strict=False):
            is_last = len(lines) == len(rows) - 1
            written = f"write {total}" if is_last else f"write {total % 10}, carry {total // 10}"
            lines.append(f"{name}: {term}, {written}.")
        return "\n".join([*lines, f"Check: {self.answer}-{self.b}={self.a}."])


def make(rng: random.Random) -> SumQuestion:
    """Draw a sum; the number of digits is uniform. `a+b` and `b+a` have the same key."""
    a, b = (_integer(rng) for _ in range(2))
    low, high = sorted((a, b))
    prompt = rng.choice(WORDINGS).format(a=a, b=b)
    return SumQuestion(key=f"{low},{high}", prompt=prompt, answer=str(a + b), a=a, b=b)


def _integer(rng: random.Random) -> int:
    num_digits = rng.randint(1, 3)
    return rng.randrange(10 ** (num_digits - 1) if num_digits > 1 else 0, 10**num_digits)
