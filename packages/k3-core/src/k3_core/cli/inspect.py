"""`k3 inspect`: parameters, bytes and tensors of a preset or of a checkpoint folder.

Reads configuration and file headers only: no torch, no weights (architecture 2, 11).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from typing import Annotated

import typer

from k3_core.checkpoint import CheckpointFolder
from k3_core.checkpoint.source import resolve_source
from k3_core.checkpoint.verify import Difference, find_differences
from k3_core.cli.table import print_json, print_table
from k3_core.config import K3Config, ParameterCounts, TensorSpec, count_parameters, tensor_manifest
from k3_core.errors import K3Error

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

_NUMBERED = re.compile(r"\b(layer|expert|block)s\.\d+\.")
_SHOWN = 20


@app.command()
def inspect(
    model: Annotated[str, typer.Argument(help="A checkpoint folder or a bundled model.")] = "",
    preset: Annotated[str, typer.Option(help="A named configuration instead.")] = "",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    tensors: Annotated[bool, typer.Option("--tensors", help="List the tensor patterns.")] = False,
) -> None:
    """Print total and active parameters, bytes and tensors; exit code 1 if a folder is unsound."""
    if bool(model) == bool(preset):
        raise K3Error("give either a folder or --preset NAME, such as `k3 inspect --preset k3`")
    differences: list[Difference] = []
    if preset:
        config = K3Config.preset(preset)
        specs = list(tensor_manifest(config))
    else:
        folder = CheckpointFolder.open(resolve_source(model))
        config = folder.config
        specs = [TensorSpec(one.name, one.shape, one.dtype) for one in folder.entries.values()]
        differences = find_differences(folder, is_exact=True)
    counts = count_parameters(config, specs)
    name = f"preset {preset}" if preset else model
    if json:
        _print_json(name, counts, specs, differences)
    else:
        _print_text(name, counts, differences)
        if tensors:
            _print_patterns(specs)
    raise typer.Exit(1 if differences else 0)


def tensor_patterns(specs: Iterable[TensorSpec]) -> list[dict[str, object]]:
    """Tensors grouped by name pattern ({layer}, {expert}, {block}), shape and dtype, counted."""
    groups = Counter((_pattern(one.name), one.shape, one.dtype) for one in specs)
    return [
        {"name": name, "count": count, "shape": list(shape), "dtype": dtype}
        for (name, shape, dtype), count in groups.items()
    ]


def _pattern(name: str) -> str:
    return _NUMBERED.sub(lambda match: f"{match[1]}s.{{{match[1]}}}.", name)


def _print_json(
    name: str, counts: ParameterCounts, specs: list[TensorSpec], differences: list[Difference]
) -> None:
    numbers = asdict(counts)
    report = {
        "model": name,
        "checkpoint_bytes": numbers.pop("num_bytes"),
        "checkpoint_tensors": numbers.pop("num_tensors"),
        "parameters": numbers,
        "tensors": tensor_patterns(specs),
        "differences": [asdict(one) for one in differences],
    }
    print_json(report)


def _print_text(name: str, counts: ParameterCounts, differences: list[Difference]) -> None:
    print(name)
    rows = [
        ("total", counts.total, ""),
        ("active", counts.active, "(input embedding excluded)"),
        ("text", counts.text, ""),
        ("routed experts", counts.routed_experts, ""),
        ("MTP", counts.mtp, ""),
        ("ViT", counts.vision_tower, ""),
        ("projector", counts.projector, ""),
    ]
    for label, count, note in rows:
        if count:
            print(f"{label:<14}  {_scaled(count):>12}  {note}".rstrip())
    print(f"{'checkpoint':<14}  {counts.num_bytes:,} bytes in {counts.num_tensors:,} tensors")
    for one in differences[:_SHOWN]:
        print(one)
    if len(differences) > _SHOWN:
        print(f"and {len(differences) - _SHOWN} more differences; --json lists all")


def _print_patterns(specs: list[TensorSpec]) -> None:
    rows = [tuple(one.values()) for one in tensor_patterns(specs)]
    print_table(("tensor", "count", "shape", "dtype"), rows)


def _scaled(count: int) -> str:
    """A count in billions (two decimals), millions or thousands (one decimal)."""
    for unit, size, digits in (("B", 10**9, 2), ("M", 10**6, 1), ("K", 10**3, 1)):
        if count >= size:
            return f"{count / size:,.{digits}f} {unit}"
    return str(count)
