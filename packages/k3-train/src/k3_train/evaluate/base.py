"""What a suite is, what it measures, and what it gives (issue 6, item 10)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from k3_core.config import ConfigError
from k3_core.errors import nearest
from k3_core.tasks import EFFORTS
from k3_train.evaluate.intervals import wilson

if TYPE_CHECKING:
    from k3_core.model import K3ForConditionalGeneration
    from k3_core.tokenizer import K3Tokenizer

LONGEST_DEFAULT = 8192
"""Tokens of the context that suites take of themselves of a model whose training is not known."""


@dataclass(frozen=True)
class Subject:
    """The model that is measured, in eval mode.

    name: how it was asked for. digest: of its weights (`k3_train.evaluate.digest`). trained_length:
    the longest sequence that it was trained on, in tokens; 0 where that is not known.
    """

    model: K3ForConditionalGeneration
    tokenizer: K3Tokenizer
    name: str
    digest: str
    trained_length: int = 0

    @property
    def context(self) -> int:
        """The length in tokens that suites fill unless they are told another."""
        nominal = self.model.config.text.max_position_embeddings
        return min(nominal, self.trained_length or LONGEST_DEFAULT)


@dataclass(frozen=True)
class Wanted:
    """What is asked of every suite alike.

    seed: of what is drawn. limit: documents of a source, questions of a family, items of a cell;
    0 leaves the suite's own number. efforts: of suites in the chat format.
    """

    seed: int = 0
    limit: int = 0
    efforts: tuple[str, ...] = EFFORTS


@dataclass(frozen=True)
class Result:
    """One figure.

    low, high: of its 95% interval, None where there is none. count: of what it is the mean over.
    effort: of the chat format, None for plain text. conditions: what else tells it from others of
    its family and metric, such as a length. harness: the program that measured, with its version,
    where it is not k3-train.
    """

    family: str
    metric: str
    value: float
    count: int
    low: float | None = None
    high: float | None = None
    effort: str | None = None
    conditions: Mapping[str, float | str] = field(default_factory=dict)
    harness: str = ""


class Suite(Protocol):
    """The target of an `Impl` of kind "suite": a frozen dataclass whose fields are its options."""

    def measure(self, subject: Subject, wanted: Wanted) -> Iterator[Result]:
        """Results as they are found; a function of the options, the model and `wanted` only."""


def accuracy(
    family: str,
    num_right: int,
    count: int,
    *,
    metric: str = "accuracy",
    effort: str | None = None,
    conditions: Mapping[str, float | str] | None = None,
) -> Result:
    """A share of right answers with Wilson's interval."""
    low, high = wilson(num_right, count)
    return Result(family, metric, num_right / count, count, low, high, effort, conditions or {})


def check_families(option: str, chosen: Collection[str], known: Collection[str]) -> None:
    """ConfigError for a family that there is not."""
    for family in chosen:
        if family not in known:
            raise unknown(option, "family", family, known)


def unknown(setting: str, kind: str, name: str, known: Collection[str]) -> ConfigError:
    """The error of a name that there is not, with the nearest and all that there are."""
    close = nearest(name, known)
    hint = f"Did you mean {close!r}? " if close else ""
    return ConfigError(setting, f"no {kind} {name!r}", f"{hint}There are: {', '.join(known)}.")
