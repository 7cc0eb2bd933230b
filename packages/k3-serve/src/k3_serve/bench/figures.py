"""From the records of a load to figures, a table of them and a file."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from k3_core.cli.table import print_table
from k3_core.plugins.filters import installed_version
from k3_serve.bench.client import Record

PACKAGES = ("k3-core", "k3-kernels", "k3-serve", "torch", "httpx", "uvicorn", "fastapi")


@dataclass(frozen=True)
class Spread:
    """Median, 95th percentile and largest of some seconds; zeros without any."""

    p50: float = 0.0
    p95: float = 0.0
    largest: float = 0.0

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """The spread of these values; percentiles are those of the nearest rank."""
        ranked = sorted(values)
        if not ranked:
            return cls()
        return cls(statistics.median(ranked), ranked[_rank(0.95, len(ranked))], ranked[-1])

    def __str__(self) -> str:
        return f"{1000 * self.p50:.0f} / {1000 * self.p95:.0f}"


def _rank(share: float, count: int) -> int:
    """Index of the nearest-rank percentile: the smallest value with `share` at or below it."""
    return max(0, -int(-share * count // 1) - 1)


@dataclass(frozen=True)
class Figures:
    """One group of requests in one run. `seconds`: from the first start to the last end.

    Tokens a second count what the group's requests generated; errors are left out of the rest.
    """

    run: str
    group: str
    num_requests: int
    num_errors: int
    seconds: float
    prompt_tokens: int
    cached_tokens: int
    latent_tokens: int
    output_tokens: int
    tokens_per_second: float
    requests_per_second: float
    ttft: Spread
    between: Spread
    end_to_end: Spread
    errors: tuple[str, ...]

    @classmethod
    def of(cls, run: str, group: str, records: Sequence[Record]) -> Figures:
        """The figures of these records, which are at least one."""
        good = [record for record in records if not record.error]
        begin = min(record.begin for record in records)
        seconds = max(record.begin + record.seconds for record in records) - begin
        output = sum(record.output_tokens for record in good)
        return cls(
            run,
            group,
            len(records),
            len(records) - len(good),
            seconds,
            sum(record.prompt_tokens for record in good),
            sum(record.cached for record in good),
            sum(record.latent for record in good),
            output,
            output / seconds,
            len(good) / seconds,
            Spread.of(record.ttft for record in good),
            Spread.of(gap for record in good for gap in record.gaps),
            Spread.of(record.seconds for record in good),
            tuple(sorted({record.error for record in records if record.error}))[:5],
        )


def by_group(run: str, records: Sequence[Record]) -> list[Figures]:
    """Figures of each group, in the order in which the groups first occur."""
    groups = dict.fromkeys(record.group for record in records)
    return [Figures.of(run, g, [r for r in records if r.group == g]) for g in groups]


@dataclass(frozen=True)
class Report:
    """Everything that one command measured; `ratios` are what the goals are stated in."""

    workload: str
    seed: int
    server: dict[str, Any]
    figures: tuple[Figures, ...]
    ratios: dict[str, float]

    @property
    def num_errors(self) -> int:
        """Requests that failed."""
        return sum(one.num_errors for one in self.figures)

    def show(self) -> None:
        """Prints the table and the ratios."""
        header = ("run", "group", "requests", "errors", "prompt", "cached", "output", "s")
        times = ("first token ms", "between ms", "whole ms")
        print_table((*header, "tokens/s", *times), [_row(one) for one in self.figures])
        print("milliseconds: median / 95th percentile")
        for name, value in self.ratios.items():
            print(f"{name}: {value:.3g}")
        for error in dict.fromkeys(error for one in self.figures for error in one.errors):
            print(f"error: {error}")

    def write(self, path: Path) -> None:
        """Writes it as JSON, with date, machine, versions and command."""
        what = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": ["k3", *sys.argv[1:]],
            "machine": machine(),
            "versions": {name: installed_version(name) for name in PACKAGES},
            **asdict(self),
        }
        path.write_text(json.dumps(what, indent=2) + "\n", encoding="utf-8")


def _row(one: Figures) -> tuple[object, ...]:
    return (
        one.run,
        one.group,
        one.num_requests,
        one.num_errors,
        one.prompt_tokens,
        one.cached_tokens,
        one.output_tokens,
        f"{one.seconds:.1f}",
        f"{one.tokens_per_second:.1f}",
        one.ttft,
        one.between,
        one.end_to_end,
    )


def machine() -> dict[str, object]:
    """What the figures were made on; the load average says whether others kept it busy."""
    return {
        "system": platform.platform(),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
    }
