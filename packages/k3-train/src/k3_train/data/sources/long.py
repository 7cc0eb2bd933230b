"""Synthetic long context: questions over long texts, and documents permuted and joined (report 6).

Lengths are in characters, about 3.6 of them a token of code.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from k3_core.config import ConfigError
from k3_train.data.clean.pipeline import Cleaner
from k3_train.data.documents import Document, Entry, Example
from k3_train.data.long_context import FAMILIES, draw_evidence, draw_item, scatter
from k3_train.data.sources.open import open_documents

ITEMS_PER_BLOCK = 20


@dataclass(frozen=True)
class LongContextSource:
    """Items of `k3_train.data.long_context`, loss on the answers; evaluations draw other items.

    families: which; empty for all. min_chars, max_chars: lengths are drawn between them, evenly on
    a logarithmic scale.
    """

    families: tuple[str, ...] = ()
    min_chars: int = 4_000
    max_chars: int = 16_000
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.min_chars <= self.max_chars:
            raise ConfigError("min_chars", f"{self.min_chars} is not in 1..{self.max_chars}")

    def block(self, number: int) -> list[Entry]:
        """Items of block `number`."""
        rng = random.Random(f"train:{self.seed}:{number}")
        families = self.families or tuple(FAMILIES)
        low, high = math.log(self.min_chars), math.log(self.max_chars)
        found: list[Entry] = []
        for _ in range(ITEMS_PER_BLOCK):
            family = rng.choice(families)
            item = draw_item(family, round(math.exp(rng.uniform(low, high))), rng)
            found.append(Example(item.prompt, item.answer, (family,)))
        return found


@dataclass(frozen=True)
class LongDocumentsSource:
    """Documents of another source, permuted, numbered and joined to texts of `chars` characters.

    Facts of `num_tasks` sub-tasks are scattered over each text and asked for at its end, beside one
    question about the order of its documents; all of it carries loss.
    base, options: the other source and its options. clean: whether its documents are cleaned.
    buffer: documents among which the next is drawn, the memory that this takes.
    """

    chars: int = 200_000
    num_tasks: int = 3
    base: str = "stdlib"
    options: dict[str, object] = field(default_factory=dict)
    clean: bool = True
    buffer: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.chars, self.buffer) < 1 or self.num_tasks < 0:
            raise ConfigError("chars", f"{self.chars}; chars and buffer must be above 0")

    def entries(self) -> Iterator[Entry]:
        """One example a joined text; a rest that is too short is left out."""
        rng = random.Random(self.seed)
        group: list[Document] = []
        size = 0
        for document in self._permuted(rng):
            group.append(document)
            size += len(document.text)
            if size >= self.chars:
                yield join_documents(group, self.num_tasks, rng)
                group, size = [], 0

    def _permuted(self, rng: random.Random) -> Iterator[Document]:
        documents = open_documents(self.base, self.options, "base")
        waiting: list[Document] = []
        for entry in Cleaner().clean(documents) if self.clean else documents:
            assert isinstance(entry, Document)
            waiting.append(entry)
            if len(waiting) > self.buffer:
                yield _take(waiting, rng)
        while waiting:
            yield _take(waiting, rng)


def join_documents(documents: list[Document], num_tasks: int, rng: random.Random) -> Example:
    """One text: documents under numbered headings, scattered facts, questions and answers."""
    pieces: list[str] = []
    for number, document in enumerate(documents, 1):
        pieces.append(f"\n=== Document {number}: {document.name} ===\n")
        pieces += document.text.split("\n\n")
    families = tuple(rng.choice(sorted(FAMILIES)) for _ in range(num_tasks))
    asked = []
    for family in families:
        evidence = draw_evidence(family, rng)
        pieces = scatter(evidence.facts, pieces, rng)
        asked.append((evidence.question, evidence.answer))
    asked.append(_about_order(documents, rng))
    questions = (f"\nQuestion: {question}\nAnswer:\n{answer}" for question, answer in asked)
    text = "\n".join(["\n\n".join(pieces), *questions])
    return Example("", text.lstrip(), (*families, "order"))


def _about_order(documents: list[Document], rng: random.Random) -> tuple[str, str]:
    some = sorted(rng.sample(range(len(documents)), min(5, len(documents))))
    names = [documents[place].name for place in some]
    listed = ", ".join(rng.sample(names, len(names)))
    return f"In which order does the text have these documents: {listed}?", ", ".join(names)


def _take(waiting: list[Document], rng: random.Random) -> Document:
    place = rng.randrange(len(waiting))
    waiting[place], waiting[-1] = waiting[-1], waiting[place]
    return waiting.pop()
