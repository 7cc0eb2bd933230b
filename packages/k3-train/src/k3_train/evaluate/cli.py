"""`k3 train evaluate`."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from k3_core.errors import K3Error
from k3_core.tasks import EFFORTS

if TYPE_CHECKING:
    from k3_train.evaluate.rows import Row

Suites = Annotated[list[str] | None, typer.Option("--suite", help="May be given several times.")]
Efforts = Annotated[list[str] | None, typer.Option("--effort", help="low, high, max; all if none.")]
Options = Annotated[
    list[str] | None, typer.Option("--set", help="An option of a suite: text.window=2048.")
]


def evaluate(
    model: Annotated[
        str,
        typer.Argument(help="A model folder, a bundled model, a run or RUN/checkpoints/step-N."),
    ],
    suites: Suites = None,
    efforts: Efforts = None,
    seed: Annotated[int, typer.Option(help="Of what is drawn.")] = 0,
    limit: Annotated[
        int, typer.Option(min=0, help="Documents, questions or items; 0 for the suite's own.")
    ] = 0,
    sets: Options = None,
    out: Annotated[Path | None, typer.Option(help="JSONL file that gets the rows too.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:N or auto.")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or auto.")] = "float32",
    data: Annotated[
        Path | None, typer.Option(help="Folder with the tokenizer, if the run's has moved.")
    ] = None,
) -> None:
    """Measure a model by suites: text, tasks, few_shot, long_context, lm_eval, or a plugin's."""
    # Imported here: they import torch.
    from k3_core.tasks.base import check_effort
    from k3_train.evaluate.base import Wanted
    from k3_train.evaluate.rows import append_rows, open_suites, suite_names
    from k3_train.evaluate.rows import evaluate as measure
    from k3_train.evaluate.subject import open_subject

    if not suites:
        raise K3Error(f"say what to measure with --suite; there are: {', '.join(suite_names())}")
    for effort in efforts or ():
        check_effort(effort)
    opened = open_suites(suites, sets or ())
    wanted = Wanted(seed, limit, tuple(efforts or EFFORTS))
    subject = open_subject(model, device=device, dtype=dtype, data=data)
    print(f"{subject.name}  {subject.digest}", flush=True)
    rows = measure(subject, opened, wanted)
    print_rows(append_rows(out, rows) if out is not None else rows)


def print_rows(rows: Iterable["Row"]) -> None:
    """A line for each row as it comes."""
    for row in rows:
        conditions = " ".join(f"{key}={_short(value)}" for key, value in row.conditions.items())
        interval = (
            "" if row.low is None or row.high is None else f" [{row.low:.4g}, {row.high:.4g}]"
        )
        print(
            f"{row.suite:<12} {row.family:<16} {row.effort or '-':<5} {row.metric:<16} "
            f"{row.value:.4f}{interval}  n={row.count}  {conditions}".rstrip(),
            flush=True,
        )


def _short(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"
