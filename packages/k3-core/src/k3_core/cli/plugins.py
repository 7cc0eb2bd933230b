"""`k3 plugins`: what is loaded, what it offers, and why something is chosen or is not.

Source: design 3 (registry). Only `doctor` imports what the declarations point at.
"""

import traceback
from typing import Annotated

import typer

from k3_core.cli.lazy import CommandRegistry
from k3_core.cli.table import print_json, print_table
from k3_core.errors import ImplUnavailable, K3Error
from k3_core.plugins import (
    API_VERSION,
    Impl,
    PluginState,
    Request,
    Resolution,
    ensure_plugins,
    resolve,
)
from k3_core.plugins.filters import reason_against, unmet_requirement

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="What the plugins offer, what is chosen and why.",
)
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:0, ...")]
Dtype = Annotated[str, typer.Option(help="float64, float32, bfloat16, float16.")]
Capability = Annotated[str, typer.Option(help="CUDA compute capability, such as 9.0.")]


@app.command("list")
def list_plugins(json: Json = False) -> None:
    """Every plugin found, with its state, its error and what it took to load."""
    registry = ensure_plugins()
    CommandRegistry.collect(registry)
    if json:
        return print_json([record.as_dict() for record in registry.records])
    print_table(
        ("plugin", "distribution", "version", "state", "impls", "load", "notes"),
        [
            (
                record.name,
                record.distribution,
                record.version,
                record.state,
                record.num_impls,
                f"{record.load_seconds * 1000:.1f} ms",
                "; ".join(filter(None, (record.error, "imports torch" * record.imports_torch))),
            )
            for record in registry.records
        ],
    )


@app.command()
def impls(
    kind: Annotated[str | None, typer.Option(help="Only this kind.")] = None,
    op: Annotated[str | None, typer.Option(help="Only this op or interface.")] = None,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    capability: Capability = "",
    json: Json = False,
) -> None:
    """Every implementation, and whether it can run on a device with a dtype."""
    registry = ensure_plugins()
    rows = []
    for impl in registry.impls(kind, op):
        request = Request(
            kind=impl.kind,
            implements=impl.implements,
            device=device,
            dtype=dtype,
            capability=_capability(capability),
        )
        rows.append((impl, registry.owner(impl), reason_against(impl, request)))
    if json:
        return print_json(
            [
                {**impl.as_dict(), "plugin": owner, "available": not reason, "reason": reason}
                for impl, owner, reason in rows
            ]
        )
    print_table(
        ("kind", "name", "plugin", "priority", "devices", "dtypes", f"on {device} {dtype}"),
        [
            (
                impl.kind,
                impl.name,
                owner,
                impl.priority,
                ",".join(sorted(impl.devices)),
                ",".join(sorted(impl.dtypes)),
                reason or "yes",
            )
            for impl, owner, reason in rows
        ],
    )


@app.command()
def why(
    kind: Annotated[str, typer.Argument(help="attention, kernel, ...")],
    op: Annotated[str, typer.Argument(help="kda, situ_glu, ...")],
    device: Device = "cpu",
    dtype: Dtype = "float32",
    feature: Annotated[list[str] | None, typer.Option(help="A feature it must have.")] = None,
    name: Annotated[str | None, typer.Option(help="Ask for this implementation.")] = None,
    capability: Capability = "",
    json: Json = False,
) -> None:
    """Which implementation is chosen for a request, and why each other one is not."""
    try:
        resolution = resolve(
            kind,
            op,
            name=name,
            device=device,
            dtype=dtype,
            features=feature or (),
            capability=_capability(capability),
        )
    except ImplUnavailable as error:
        if not json:
            raise
        print_json({"kind": kind, "implements": op, "chosen": None, "error": str(error)})
        raise typer.Exit(2) from error
    if json:
        return print_json(resolution.as_dict())
    _print_resolution(resolution)


@app.command()
def doctor(json: Json = False) -> None:
    """Import every target and every command; print tracebacks; exit code 1 on a failure."""
    registry = ensure_plugins()
    commands = CommandRegistry.collect(registry).all()
    fine = (PluginState.OK, PluginState.BLOCKED)
    problems = [
        (f"plugin {record.name}", record.error, record.traceback)
        for record in registry.records
        if record.state not in fine
    ]
    rows = registry.impls()
    skipped = {impl.name: reason for impl in rows if (reason := _reason_to_skip(impl))}
    loaders = {f"{i.kind} {i.name}": i.load for i in rows if i.name not in skipped}
    loaders |= {f"command {command.name}": command.load for command in commands}
    for label, load in loaders.items():
        try:
            load()
        except Exception as error:
            problems.append((label, str(error), traceback.format_exc()))
    if json:
        keys = ("what", "error", "traceback")
        found = [dict(zip(keys, problem, strict=True)) for problem in problems]
        print_json({"checked": len(loaders), "skipped": skipped, "problems": found})
    else:
        for label, message, trace in problems:
            print(f"{label}: {message}\n{trace}")
        for label, reason in skipped.items():
            print(f"{label}: not imported, {reason}")
        print(f"{len(loaders)} targets imported, {len(problems)} problems")
    if problems:
        raise typer.Exit(1)


def _reason_to_skip(impl: Impl) -> str:
    if impl.api != API_VERSION:
        return f"written for plugin contract {impl.api}"
    return unmet_requirement(impl)


def _print_resolution(resolution: Resolution) -> None:
    request, chosen = resolution.request, resolution.chosen
    wanted = ", ".join([request.device, request.dtype, *sorted(request.features)])
    print(f"{request.kind} {request.implements} for {wanted}")
    print(f"chosen: {chosen.name} by {resolution.source} ({chosen.summary or 'no summary'})")
    print(f"target: {chosen.target}")
    if not resolution.rejected:
        print("no other candidates")
        return
    print()
    print_table(
        ("rejected", "reason"), [(impl.name, reason) for impl, reason in resolution.rejected]
    )


def _capability(text: str) -> tuple[int, int] | None:
    if not text:
        return None
    major, dot, minor = text.partition(".")
    if not (dot and major.isdecimal() and minor.isdecimal()):
        raise K3Error(f"--capability {text!r} is not MAJOR.MINOR, such as 9.0")
    return int(major), int(minor)
