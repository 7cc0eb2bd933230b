"""`k3 train study` and `k3 train scaling`."""

from pathlib import Path
from typing import Annotated

import typer

Out = Annotated[Path, typer.Option(help="Folder of all studies: OUT/NAME holds the results.")]


def study(
    name: Annotated[
        str | None, typer.Argument(help="A shipped study, or a TOML file; none lists them.")
    ] = None,
    arms: Annotated[str, typer.Option(help="Arms by name, with commas; empty for all.")] = "",
    scale: Annotated[str, typer.Option(help="cpu, h200 or tiny.")] = "cpu",
    budget_minutes: Annotated[
        float, typer.Option(help="No run begins that would end later, and none goes on after it.")
    ] = 5.0,
    workers: Annotated[int, typer.Option(help="Runs at a time; 0 is what the scale says.")] = 0,
    out: Out = Path("docs/studies"),
    work: Annotated[Path, typer.Option(help="Folder of corpora and unfinished runs.")] = Path(
        "runs/studies"
    ),
) -> None:
    """Run what is missing of a study and draw its page; finished runs are kept and skipped."""
    import time

    from k3_core.errors import K3Error
    from k3_train.study.declare import load_study, study_names

    if name is None:
        for one in map(load_study, study_names()):
            print(f"{one.name}: {one.title}; arms {', '.join(a.name for a in one.all_arms())}")
        return
    if budget_minutes <= 0 or workers < 0:
        raise K3Error(f"--budget-minutes {budget_minutes} --workers {workers}: give positive ones")
    deadline = time.monotonic() + 60 * budget_minutes
    # Imported here: they import torch.
    from k3_train.study.page import write_index, write_page
    from k3_train.study.runner import Runner

    chosen = load_study(name)
    wanted = [one.strip() for one in arms.split(",") if one.strip()]
    folder = out / chosen.name
    runner = Runner(
        chosen, scale, chosen.chosen(wanted), out=folder, work=work / f"{chosen.name}-{scale}"
    )
    outcome = runner.run(deadline=deadline, workers=workers or runner.scale.workers)
    path = write_page(chosen, folder)
    write_index(out)
    end = "all runs are done" if outcome.is_done else "runs are left: call it again to go on"
    print(f"{outcome.num_added} runs added, {outcome.num_found} were there; {end}; page: {path}")


def scaling(
    results: Annotated[Path, typer.Argument(help="A results.jsonl, of any study.")],
    scale: Annotated[str, typer.Option(help="Rows of this scale.")] = "cpu",
) -> None:
    """Fit held-out loss against FLOPs and say how little the runs support."""
    from k3_core.errors import K3Error
    from k3_train.report.run_page import read_lines
    from k3_train.study.scaling import describe_law

    rows = [row for row in read_lines(results) if row["scale"] == scale]
    if not rows:
        raise K3Error(f"{results} has no rows of scale {scale!r}: run `k3 train study` first")
    print(describe_law(rows))
