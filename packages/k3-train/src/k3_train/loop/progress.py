"""What a person sees of a run: a live line on a terminal, plain lines elsewhere."""

import sys
from typing import Protocol, Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from k3_train.loop.log import LogRow


class Reporter(Protocol):
    """A context manager that is told about rows and notes."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None: ...

    def row(self, row: LogRow, seconds_left: float) -> None:
        """Show a new row."""

    def note(self, text: str) -> None:
        """Say something that is not a row."""


def describe(row: LogRow) -> str:
    """The figures of a row in words, without the step."""
    return (
        f"loss {row.loss:.4f}  lr {row.lr:.2e}  {row.tokens_per_s:,.0f} tok/s  "
        f"load max/mean {row.max_over_mean_load:.2f}  dead {row.dead_experts}"
    )


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
    """A progress bar that carries the newest row."""

    def __init__(self, total_steps: int, console: Console) -> None:
        self._progress = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=20),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._progress.add_task("waiting for the first row", total=total_steps)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def row(self, row: LogRow, seconds_left: float) -> None:
        """Move the bar; the bar estimates the time left itself."""
        self._progress.update(self._task, completed=row.step, description=describe(row))

    def note(self, text: str) -> None:
        """Print the text above the bar."""
        self._progress.console.print(text, markup=False, highlight=False)


def make_reporter(total_steps: int, stream: TextIO | None = None) -> Reporter:
    """Live on a terminal, plain otherwise; to stdout when no stream is given."""
    stream = stream or sys.stdout
    console = Console(file=stream)
    if console.is_terminal:
        return LiveReporter(total_steps, console)
    return PlainReporter(total_steps, stream)
