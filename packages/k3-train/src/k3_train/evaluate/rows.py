"""A measured figure with all that says how it came about, as a line of JSON."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from k3_core.config import ConfigError, apply_overrides, load_dataclass
from k3_core.plugins import ensure_plugins, resolve
from k3_train.__about__ import __version__
from k3_train.evaluate.base import Result, Subject, Suite, Wanted, unknown

HARNESS = f"k3-train {__version__}"


@dataclass(frozen=True)
class Row:
    """One figure; the order of the keys is fixed.

    low, high: its 95% interval. count: documents, questions or items. effort: of the chat format,
    null for plain text. harness: the program that measured, with its version. seed: of the run of
    the suite. checkpoint: digest of the weights. date: UTC, when it was measured.
    """

    suite: str
    family: str
    conditions: Mapping[str, float | str]
    metric: str
    value: float
    low: float | None
    high: float | None
    count: int
    effort: str | None
    harness: str
    seed: int
    model: str
    checkpoint: str
    date: str

    def line(self, **more: int) -> str:
        """A line of a JSONL file; `more` comes first."""
        return json.dumps({**more, **asdict(self)}) + "\n"


def open_suite(name: str, options: Mapping[str, object] | None = None) -> Suite:
    """The suite `name` of a plugin with its options; ConfigError for an unknown one of either."""
    known = suite_names()
    if name not in known:
        raise unknown("suite", "suite", name, known)
    suite: Suite = load_dataclass(resolve("suite", name).load(), options or {}, name)  # type: ignore[arg-type]
    return suite


def open_suites(names: Sequence[str], sets: Sequence[str] = ()) -> dict[str, Suite]:
    """Suites by name; `sets` are changes of their options, `suite.option=value`.

    ConfigError also for options of a suite that is not among them.
    """
    options = apply_overrides({}, sets)
    for name, table in options.items():
        if name not in names or not isinstance(table, Mapping):
            raise ConfigError(
                "--set",
                f"{name!r} is not a suite that is asked for",
                f"Write SUITE.option=value with one of: {', '.join(names)}.",
            )
    return {name: open_suite(name, options.get(name)) for name in names}  # type: ignore[arg-type]


def suite_names() -> list[str]:
    """Names of the suites that plugins offer."""
    return sorted({impl.implements for impl in ensure_plugins().impls("suite")})


def evaluate(subject: Subject, suites: Mapping[str, Suite], wanted: Wanted) -> Iterator[Row]:
    """The rows of all suites, each as soon as it is known."""
    for name, suite in suites.items():
        for result in suite.measure(subject, wanted):
            yield row_of(subject, name, result, wanted.seed)


def row_of(subject: Subject, suite: str, result: Result, seed: int) -> Row:
    """A result with where it comes from."""
    return Row(
        suite=suite,
        family=result.family,
        conditions=dict(result.conditions),
        metric=result.metric,
        value=result.value,
        low=result.low,
        high=result.high,
        count=result.count,
        effort=result.effort,
        harness=result.harness or HARNESS,
        seed=seed,
        model=subject.name,
        checkpoint=subject.digest,
        date=f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
    )


def append_rows(path: Path, rows: Iterable[Row]) -> Iterator[Row]:
    """Pass rows on, each after it is at the end of the file: what is cut short keeps its rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for row in rows:
            file.write(row.line())
            file.flush()
            yield row
