"""`k3 train`: fit, resume, report, study, and what is beside them (training 7)."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from k3_core.errors import K3Error
from k3_train.data.cli import data_app, tokenizer
from k3_train.evaluate.cli import evaluate
from k3_train.study.cli import scaling, study
from k3_train.tools.cli import doctor, export, inspect

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="Train a model, build its data.",
)
app.add_typer(data_app, name="data", help="Build token files, count them.")
app.command()(tokenizer)
for command in (evaluate, export, inspect, doctor, study, scaling):
    app.command()(command)

Minutes = Annotated[
    float | None,
    typer.Option(help="Time limit, set-up and export included; fractions are allowed."),
]
Sets = Annotated[list[str] | None, typer.Option("--set", help="Change a setting: a.b=c.")]
Data = Annotated[Path | None, typer.Option(help="Folder of token files and their tokenizer.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or auto.")]


@app.command()
def fit(
    out: Annotated[Path, typer.Option(help="Folder of the run; it must not hold one.")],
    preset: Annotated[str | None, typer.Option(help="Model preset, such as k3-test.")] = None,
    minutes: Minutes = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps to take.")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file of settings.")] = None,
    sets: Sets = None,
    data: Data = None,
    device: Device = None,
    init: Annotated[Path | None, typer.Option(help="Start from the weights of a model.")] = None,
    tensorboard: Annotated[bool, typer.Option(help="Write TensorBoard files too.")] = False,
) -> None:
    """Train a model from its start and export it to OUT/model."""
    started = time.perf_counter()
    # Imported here: they import torch.
    from k3_train.config import load_train_config
    from k3_train.loop.curriculum import Curriculum
    from k3_train.loop.session import start

    overrides = _overrides(sets, data, device)
    if init is not None:
        overrides.append(f"model.init_from='{init.resolve() if init.exists() else init}'")
    settings = load_train_config(preset=preset, file=config, overrides=overrides)
    if tensorboard and "tensorboard" not in settings.run.loggers:
        loggers = (*settings.run.loggers, "tensorboard")
        settings = replace(settings, run=replace(settings.run, loggers=loggers))
    planned = settings.run.steps or Curriculum(settings).total_steps
    if steps is None and minutes is None and not planned:
        raise K3Error("say how long to train: --steps N or --minutes M")
    _check_length(steps, minutes)
    _report(start(settings, out, started=started).train(steps=steps, minutes=minutes), out)


@app.command()
def resume(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    steps: Annotated[int | None, typer.Option(help="Optimizer steps more.")] = None,
    minutes: Minutes = None,
    sets: Sets = None,
    data: Data = None,
    device: Device = None,
) -> None:
    """Continue a run from its newest checkpoint; without a length, to the steps it planned."""
    started = time.perf_counter()
    from k3_train.loop.session import reopen

    _check_length(steps, minutes)
    session = reopen(run, overrides=_overrides(sets, data, device), started=started)
    _report(session.train(steps=steps, minutes=minutes), run)


@app.command("config-schema")
def schema() -> None:
    """Print the JSON schema of a settings file."""
    from k3_train.schema import config_schema

    print(json.dumps(config_schema(), indent=1))


@app.command()
def report(run: Annotated[Path, typer.Argument(help="Folder of a run.")]) -> None:
    """Write RUN/report.html, one page without scripts that needs no network."""
    from k3_train.report.run_page import write_report

    print(f"report: {write_report(run)}")


def _overrides(sets: list[str] | None, data: Path | None, device: str | None) -> list[str]:
    overrides = list(sets or ())
    if data is not None:
        overrides.append(f"data.path='{data.resolve()}'")
    if device is not None:
        overrides.append(f"run.device='{device}'")
    return overrides


def _check_length(steps: int | None, minutes: float | None) -> None:
    if steps is not None and minutes is not None:
        raise K3Error("--steps and --minutes exclude each other: give one")
    if (steps is not None and steps < 1) or (minutes is not None and minutes <= 0):
        raise K3Error(f"--steps {steps} --minutes {minutes}: give a positive length")


def _report(stopped: str, folder: Path) -> None:
    if stopped:
        print(f"stopped by {stopped}; continue with `k3 train resume {folder}`")
    else:
        print(f"model: {folder / 'model'}")
