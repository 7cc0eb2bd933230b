"""Questions whose answers need evidence from across a long text, with exact answers (report 6).

Facts are scattered over a text of filler, one in each of equally long parts, so no part answers
alone. Families: `needle` (one fact), `multi_key` (some of many like facts), `multi_hop` (a chain
of references in any order, beside another chain), `state_retention` (registers that are changed
again and again: only all changes in order give the final value).
"""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from k3_core.errors import K3Error, nearest
from k3_core.tasks.words import KEYS, VALUES

NUM_KEYS, NUM_ASKED = 16, 4
NUM_HOPS = 4
NUM_REGISTERS, NUM_CHANGES = 3, 18
FRAME = (
    "Read the text and answer the question below it.\n\n{text}\n\nQuestion: {question}\nAnswer:\n"
)

Filler = Callable[[random.Random], str]
"""Draws one piece of filler: a sentence, a paragraph or a document."""


@dataclass(frozen=True)
class Item:
    """A question for a model: its first line is right when it is exactly `answer`.

    length: of the prompt, in the unit in which it was asked for. distractors: wrong answers of the
    same form, made of what the text says of other things; families may have none.
    """

    prompt: str
    answer: str
    family: str
    length: int
    distractors: tuple[str, ...] = ()


@dataclass(frozen=True)
class Evidence:
    """Facts in the order in which the text has to have them, and what is asked of them."""

    facts: tuple[str, ...]
    question: str
    answer: str
    distractors: tuple[str, ...] = ()


def draw_item(
    family: str,
    length: int,
    rng: random.Random,
    *,
    filler: Filler | None = None,
    count: Callable[[str], int] = len,
    depth: float | None = None,
) -> Item:
    """A prompt of at most `length`, and at least nine tenths of it when the filler's pieces allow.

    `count` measures a text: characters, or tokens by `lambda text: len(tokenizer.encode(text))`.
    `depth`, from 0 to 1, says where in its part of the text each fact is; None draws it.
    K3Error for an unknown family and a length that the facts alone exceed.
    """
    evidence = draw_evidence(family, rng)
    frame = FRAME.format(text="", question=evidence.question)
    needed = count(frame) + sum(count(fact + "\n") for fact in evidence.facts)
    if needed > length:
        raise K3Error(f"{family} needs a length of {needed} at least, {length} was asked for")
    pieces = _fill(length - needed, rng, filler or filler_sentence, count)
    while True:
        text = "\n".join(scatter(evidence.facts, pieces, rng, depth))
        prompt = FRAME.format(text=text, question=evidence.question)
        total = count(prompt)
        if total <= length:
            return Item(prompt, evidence.answer, family, total, evidence.distractors)
        # The parts of a text have other tokens together than alone.
        pieces = pieces[: -max(1, (total - length) * len(pieces) // total)]


def draw_evidence(family: str, rng: random.Random) -> Evidence:
    """Facts and a question of `family`; K3Error for an unknown one."""
    if family not in FAMILIES:
        close = nearest(family, FAMILIES)
        hint = f"; did you mean {close!r}?" if close else "."
        raise K3Error(f"no family {family!r}{hint} There are: {', '.join(FAMILIES)}")
    return FAMILIES[family](rng)


def scatter(
    facts: Sequence[str], pieces: Sequence[str], rng: random.Random, depth: float | None = None
) -> list[str]:
    """The pieces with one fact in each of `len(facts)` equally long runs of them, in order."""
    woven: list[str] = []
    start = 0
    for number, fact in enumerate(facts):
        stop = len(pieces) * (number + 1) // len(facts)
        place = rng.randint(start, stop) if depth is None else start + round(depth * (stop - start))
        woven += [*pieces[start:place], fact, *pieces[place:stop]]
        start = stop
    return woven


def filler_sentence(rng: random.Random) -> str:
    """A sentence of common words that states no number and no register."""
    first, second, third = rng.sample(KEYS, 3)
    where, how = rng.sample([word for word in VALUES if word not in NUMERALS], 2)
    form = rng.choice(SENTENCES)
    return form.format(a=first, b=second, c=third, x=where, y=how)


NUMERALS = frozenset(
    {"one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"}
)
SENTENCES = (
    "The {a} stands beside the {x} {b}, and nobody asks about the {c}.",
    "A {x} {a} was left near the {b} while the {y} {c} was carried home.",
    "They looked for the {a} in the {x} {b} and found the {c} there.",
    "Some say that the {a} is {x}; others prefer the {y} {b} or the {c}.",
    "In {x} light the {a} and the {b} look like a {y} {c}.",
)


def _needle(rng: random.Random) -> Evidence:
    name = _names(rng, 1)[0]
    code = _code(rng)
    return Evidence(
        (f"The code of the {name} is {code}.",), f"What is the code of the {name}?", code
    )


def _multi_key(rng: random.Random) -> Evidence:
    codes = {name: _code(rng) for name in _names(rng, NUM_KEYS)}
    asked = rng.sample(sorted(codes), NUM_ASKED)
    facts = tuple(f"The code of the {name} is {code}." for name, code in codes.items())
    listed = ", ".join(f"the {name}" for name in asked)
    others = [code for name, code in codes.items() if name not in asked]
    return Evidence(
        facts,
        f"What are the codes of {listed}? Give them in this order, with commas.",
        ", ".join(codes[name] for name in asked),
        tuple(
            ", ".join(others[i : i + NUM_ASKED])
            for i in range(0, len(others) - NUM_ASKED + 1, NUM_ASKED)
        ),
    )


def _multi_hop(rng: random.Random) -> Evidence:
    names = _names(rng, 2 * (NUM_HOPS + 1))
    facts: list[str] = []
    answers = []
    for chain in (names[: NUM_HOPS + 1], names[NUM_HOPS + 1 :]):
        answers.append(_code(rng))
        facts.append(f"The code of the {chain[0]} is {answers[-1]}.")
        facts += [
            f"The code of the {later} is that of the {earlier}."
            for earlier, later in pairwise(chain)
        ]
    rng.shuffle(facts)
    question = f"What is the code of the {names[NUM_HOPS]}?"
    return Evidence(tuple(facts), question, answers[0], (answers[1],))


def _state_retention(rng: random.Random) -> Evidence:
    registers = [f"register {letter}" for letter in rng.sample("ABCDEFGHJK", NUM_REGISTERS)]
    values = {one: rng.randrange(100) for one in registers}
    earlier = {one: [value] for one, value in values.items()}
    facts = [f"Now {one} is set to {value}." for one, value in values.items()]
    for _ in range(NUM_CHANGES):
        one, other = rng.sample(registers, 2)
        amount = rng.randint(1, 20)
        kind = rng.choice(("up", "down", "copy"))
        if kind == "copy":
            values[one] = values[other]
            facts.append(f"Now {one} takes the value of {other}.")
        else:
            values[one] += amount if kind == "up" else -amount
            facts.append(f"Now {one} goes {kind} by {amount}.")
        earlier[one].append(values[one])
    asked = rng.choice(registers)
    wrong = [*(values[one] for one in registers), *reversed(earlier[asked])]
    distractors = [str(value) for value in dict.fromkeys(wrong) if value != values[asked]]
    question = f"What is the value of {asked} after all changes?"
    return Evidence(tuple(facts), question, str(values[asked]), tuple(distractors[:3]))


FAMILIES: dict[str, Callable[[random.Random], Evidence]] = {
    "needle": _needle,
    "multi_key": _multi_key,
    "multi_hop": _multi_hop,
    "state_retention": _state_retention,
}


def _fill(
    budget: int, rng: random.Random, filler: Filler, count: Callable[[str], int]
) -> list[str]:
    pieces: list[str] = []
    while True:
        piece = re.sub(r"\n{3,}", "\n\n", filler(rng))
        budget -= count(piece + "\n")
        if budget < 0:
            return pieces
        pieces.append(piece)


def _names(rng: random.Random, count: int) -> list[str]:
    """Different two-word names, which filler sentences do not have."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[f"{rng.choice(VALUES)} {rng.choice(KEYS)} number {rng.randint(10, 99)}"] = None
    return list(found)


def _code(rng: random.Random) -> str:
    return str(rng.randrange(10_000, 100_000))
