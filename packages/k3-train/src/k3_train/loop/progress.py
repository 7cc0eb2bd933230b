"""What a person sees of a run: a live panel on a terminal, plain lines elsewhere."""

import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol, Self, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from k3_train.loop.log import LogRow

_COLUMNS = 4
"""Figures in a line of the panel."""


class Reporter(Protocol):
    """A context manager that is told about rows and notes."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None: ...

    def row(self, row: LogRow, seconds_left: float) -> None:
        """Show a new row."""

    def note(self, text: str) -> None:
        """Say something that is not a row."""


def figures(row: LogRow) -> list[tuple[str, str]]:
    """What a person wants to see of a row, as (name, value); MFU where the peak is known."""
    shown = [
        ("loss", f"{row.loss:.4f}"),
        ("lr", f"{row.lr:.2e}"),
        ("tok/s", f"{row.tokens_per_s:,.0f}"),
    ]
    if "mfu" in row.values:
        shown.append(("MFU", f"{row.values['mfu']:.1%}"))
    shown += [("max/mean", f"{row.max_over_mean_load:.2f}"), ("dead", str(row.dead_experts))]
    if "skipped_steps" in row.values:
        shown.append(("skipped", f"{row.values['skipped_steps']:.0f}"))
    return shown


def describe(row: LogRow) -> str:
    """The figures of a row in a line, without the step."""
    return "  ".join(f"{name} {value}" for name, value in figures(row))


class PlainReporter:
    """One line per row."""

    def __init__(self, total_steps: int, stream: TextIO) -> None:
        self._total, self._stream = total_steps, stream

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stream.flush()

    def row(self, row: LogRow, seconds_left: float) -> None:
        """Print the row with the time left."""
        self.note(f"step {row.step}/{self._total}  {describe(row)}  eta {seconds_left:.0f}s")

    def note(self, text: str) -> None:
        """Print the text."""
        print(text, file=self._stream, flush=True)


class LiveReporter:
    """A panel with the newest row above a progress bar; notes scroll by above it."""

    def __init__(self, total_steps: int, console: Console) -> None:
        self._progress = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=None),
            TextColumn("eta {task.fields[eta]}"),
            console=console,
        )
        self._task = self._progress.add_task("", total=total_steps, eta="after the first row")
        self._live = Live(self._panel(()), console=console, refresh_per_second=2)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()

    def row(self, row: LogRow, seconds_left: float) -> None:
        """Show the row and the time left at the pace of this call."""
        eta = str(timedelta(seconds=round(seconds_left)))
        self._progress.update(self._task, completed=row.step, eta=eta)
        self._live.update(self._panel(figures(row)))

    def note(self, text: str) -> None:
        """Print the text above the panel."""
        self._live.console.print(text, markup=False, highlight=False)

    def _panel(self, shown: Sequence[tuple[str, str]]) -> Panel:
        table = Table.grid(padding=(0, 2))
        for begin in range(0, len(shown), _COLUMNS):
            cells = shown[begin : begin + _COLUMNS]
            table.add_row(*(f"[dim]{name}[/dim] {value}" for name, value in cells))
        return Panel(Group(table, self._progress), title="k3 train", expand=True)


def make_reporter(total_steps: int, stream: TextIO | None = None) -> Reporter:
    """Live on a terminal, plain otherwise; to stdout when no stream is given."""
    stream = stream or sys.stdout
    console = Console(file=stream)
    if console.is_terminal:
        return LiveReporter(total_steps, console)
    return PlainReporter(total_steps, stream)
