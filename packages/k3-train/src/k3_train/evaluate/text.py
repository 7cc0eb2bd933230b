"""The suite `text`: perplexity a token and bits a byte of documents, by source and in all.

A document is read as `[BOS] text` on its own. Long ones are read in windows that overlap: each
token counts once, predicted from `overlap` tokens before it at least. The bytes are those that the
scored tokens spell, in UTF-8; `[EOS]` is not scored. Empty documents count nowhere.
Legend: T tokens of a document.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from k3_core.config import ConfigError
from k3_core.errors import K3Error
from k3_core.evaluate.losses import document_losses
from k3_core.evaluate.text import heldout_texts
from k3_train.data.sources.open import open_documents
from k3_train.evaluate.base import Result, Subject, Wanted
from k3_train.evaluate.intervals import ratio

NUM_DOCUMENTS = 100
TOKENS_PER_PASS = 16_384
HELDOUT = "heldout"


@dataclass(frozen=True)
class Losses:
    """Of each document of one source: its loss in nats, its tokens and its bytes."""

    nats: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class TextSuite:
    """Options of the suite `text`.

    sources: name -> table with `kind`, the registry name of a source of documents, and its options;
    empty takes the held-out files of the standard library, named "heldout". window: tokens read at
    once; 0 takes the model's context. overlap: of windows; -1 takes a quarter.
    """

    sources: dict[str, dict[str, object]] = field(default_factory=dict)
    window: int = 0
    overlap: int = -1

    def __post_init__(self) -> None:
        if self.window < 0 or (self.window and not -1 <= self.overlap < self.window):
            raise ConfigError(
                "text.overlap",
                f"{self.overlap} is not in -1..{self.window - 1}, below the window",
                "Give a window of 1 or more and an overlap below it.",
            )

    def measure(self, subject: Subject, wanted: Wanted) -> Iterator[Result]:
        """Two results a source, and two of all sources together when there are several."""
        limit = wanted.limit or NUM_DOCUMENTS
        together = Losses()
        texts = self._texts()
        for name, documents in texts.items():
            losses = self._losses(subject, islice(documents, limit))
            if not losses.nats:
                raise K3Error(f"source {name!r} of the suite text gave no text to read")
            yield from results(name, losses)
            for part, more in zip(vars(together).values(), vars(losses).values(), strict=True):
                part.extend(more)
        if len(texts) > 1:
            yield from results("all", together)

    def _texts(self) -> dict[str, Iterable[str]]:
        if not self.sources:
            return {HELDOUT: heldout_texts()}
        return {name: _documents(name, table) for name, table in self.sources.items()}

    def _losses(self, subject: Subject, texts: Iterable[str]) -> Losses:
        tokenizer = subject.tokenizer
        encoded = [ids for text in texts if (ids := tokenizer.encode(text))]
        window = self.window or subject.context
        found = document_losses(
            subject.model,
            [[tokenizer.bos_id, *ids] for ids in encoded],
            window=window,
            overlap=None if self.overlap < 0 else self.overlap,
            tokens_per_forward=max(window, TOKENS_PER_PASS),
        )
        return Losses(
            nats=[math.fsum(losses_T.tolist()) for losses_T in found],
            tokens=[len(ids) for ids in encoded],
            bytes=[len(tokenizer.decode_bytes(ids)) for ids in encoded],
        )


def results(name: str, losses: Losses) -> Iterator[Result]:
    """Bits a byte and perplexity a token; both intervals take documents as the draws."""
    bits = ratio([nats / math.log(2) for nats in losses.nats], losses.bytes)
    value, low, high = ratio(losses.nats, losses.tokens)
    perplexity = (
        math.exp(value),
        None if low is None else math.exp(low),
        None if high is None else math.exp(high),
    )
    conditions = {"tokens": sum(losses.tokens), "bytes": sum(losses.bytes)}
    for metric, found in (("bits_per_byte", bits), ("perplexity", perplexity)):
        value, low, high = found
        yield Result(name, metric, value, len(losses.nats), low, high, conditions=conditions)


def _documents(name: str, table: dict[str, object]) -> Iterator[str]:
    options, setting = dict(table), f"text.sources.{name}"
    kind = options.pop("kind", None)
    if not isinstance(kind, str):
        raise ConfigError(
            setting, f"kind is {kind!r}", 'Name a source of documents, such as kind = "local".'
        )
    return (document.text for document in open_documents(kind, options, setting))
