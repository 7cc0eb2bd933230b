"""What a data source yields, and what the source itself is (report 6, training 4).

A `Document` is raw text that cleaning may drop; an `Example` and a `Conversation` are generated
and carry loss on a part of their tokens only, as does text `Interleaved` with pictures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from k3_train.data.conversations import Conversation

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True)
class Document:
    """Bytes as they were found. `name` says where; its suffix says what they are."""

    name: str
    data: bytes

    @cached_property
    def text(self) -> str:
        """The bytes as UTF-8; what is not UTF-8 becomes U+FFFD."""
        return self.data.decode("utf-8", "replace")

    @cached_property
    def suffix(self) -> str:
        """Lower-case suffix of the name with its dot, empty when there is none."""
        return PurePosixPath(self.name).suffix.lower()


@dataclass(frozen=True)
class Example:
    """A prompt without loss, and its answer with loss; `families` says what it trains."""

    prompt: str
    answer: str
    families: tuple[str, ...] = ()


@dataclass(frozen=True)
class Text:
    """A piece of text between pictures. has_loss: on predicting it."""

    text: str
    has_loss: bool


@dataclass(frozen=True)
class Picture:
    """One item of the vision tower: an image, or up to four frames of a clip of one size.

    seconds: when a clip starts in its video; None for an image.
    """

    frames: tuple[Image.Image, ...]
    seconds: float | None = None


@dataclass(frozen=True)
class Interleaved:
    """Text and pictures in any order; `families` says what it trains."""

    parts: tuple[Text | Picture, ...]
    families: tuple[str, ...] = ()


Entry = Document | Example | Conversation | Interleaved


@runtime_checkable
class Corpus(Protocol):
    """A source that ends. Sources are frozen dataclasses; their fields are their options."""

    def entries(self) -> Iterator[Entry]:
        """Every entry, in an order that depends on the options only."""


@runtime_checkable
class Generator(Protocol):
    """A source without end, in blocks that can be made anywhere and in any order."""

    def block(self, number: int) -> list[Entry]:
        """Block `number`, a function of the options and the number."""


@runtime_checkable
class Described(Protocol):
    """A source that has more than its options to say in the manifest."""

    def describe(self) -> Mapping[str, object]:
        """What else identifies the content, such as versions; JSON values."""


Source = Corpus | Generator
