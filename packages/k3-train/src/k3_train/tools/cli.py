"""`k3 train export`, `inspect` and `doctor`."""

from pathlib import Path
from typing import Annotated

import typer

Preset = Annotated[str | None, typer.Option(help="Model preset, such as k3-mini.")]
Config = Annotated[Path | None, typer.Option(help="TOML file of settings.")]
Sets = Annotated[list[str] | None, typer.Option("--set", help="Change a setting: a.b=c.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def export(
    source: Annotated[Path, typer.Argument(help="Folder of a run, or RUN/checkpoints/step-N.")],
    out: Annotated[Path, typer.Option(help="Folder of the model; it must be empty.")],
    data: Annotated[
        Path | None, typer.Option(help="Folder with the tokenizer, if the run's has moved.")
    ] = None,
) -> None:
    """Write a checkpoint's model in the released layout, with its tokenizer."""
    # Imported here and below: they import torch.
    from k3_train.tools.export import export as write

    step = write(source, out, data=data)
    print(f"model of step {step}: {out}")


def inspect(
    preset: Preset = None, config: Config = None, sets: Sets = None, as_json: Json = False
) -> None:
    """Roles, parameters, FLOPs a token and memory of a configuration; no weights are made."""
    from k3_core.cli.table import print_json, print_table
    from k3_train.config import load_train_config
    from k3_train.tools.inspect import as_dict, inspect_config

    settings = load_train_config(preset=preset, file=config, overrides=sets or ())
    report = inspect_config(settings)
    if as_json:
        return print_json(as_dict(report))
    rows = [
        (
            row.role,
            row.rule,
            "yes" if row.is_decayed else "no",
            row.num_tensors,
            f"{row.num_parameters:,}",
            ", ".join(f"{count:,} of {shape}" for shape, count in row.blocks.items()),
        )
        for row in report.roles
    ]
    print_table(("role", "rule", "decay", "tensors", "parameters", "Muon's matrices"), rows)
    print(f"\nparameters      {report.total:,} in all, {report.active:,} active")
    print(f"without the head {report.active_without_head:,} active")
    print(
        f"FLOPs a token   {report.dense_flops:,} (6 x active) + {report.attention_flops:,} of "
        f"attention in pieces of {report.max_seq_len:,}"
    )
    for name, size in report.state_bytes.items():
        print(f"{name:<14}  {size / 2**30:9.3f} GiB")
    total = sum(report.state_bytes.values()) / 2**30
    print(f"{'state':<14}  {total:9.3f} GiB, activations not counted")


def doctor(
    preset: Preset = None,
    config: Config = None,
    sets: Sets = None,
    data: Annotated[Path | None, typer.Option(help="Folder of token files to verify.")] = None,
    out: Annotated[Path, typer.Option(help="Where runs will be.")] = Path("."),
) -> None:
    """Check versions, device, implementations, a tiny step, disk space and data; code 1 if not."""
    from k3_train.config import load_train_config
    from k3_train.tools.doctor import examine

    overrides = list(sets or ())
    if data is not None:
        overrides.append(f"data.path='{data.resolve()}'")
    settings = load_train_config(preset=preset, file=config, overrides=overrides)
    is_fine = True
    for check in examine(settings, out):
        print(f"{'ok' if check.is_fine else 'BAD':<4} {check.name:<16} {check.text}", flush=True)
        is_fine &= check.is_fine
    raise typer.Exit(0 if is_fine else 1)
