"""`k3 plugins`: what is loaded, what it offers, and why something is chosen or is not.

Source: design 3 (registry). argparse, because typer alone takes longer than these may;
only `doctor` imports what the declarations point at.
"""

import argparse
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from k3_core.cli.doctor import examine
from k3_core.cli.lazy import CommandRegistry
from k3_core.cli.table import print_json, print_table
from k3_core.errors import ImplUnavailable
from k3_core.plugins import KINDS, Impl, Request, Resolution, ensure_plugins, resolve
from k3_core.plugins.filters import reason_against


def main(arguments: Sequence[str]) -> int:
    """Run `k3 plugins ARGUMENTS` and return the exit code."""
    options = _parser().parse_args(arguments)
    return int(options.run(options))


def list_plugins(options: Namespace) -> int:
    """Every plugin found, with its state, its error and what it took to load."""
    registry = ensure_plugins()
    CommandRegistry.collect(registry)
    if options.json:
        print_json([record.as_dict() for record in registry.records])
        return 0
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
    return 0


def list_impls(options: Namespace) -> int:
    """Every implementation, and whether it can run on a device with a dtype."""
    registry = ensure_plugins()
    rows = [
        (impl, registry.owner(impl), reason_against(impl, _request(impl, options)))
        for impl in registry.impls(options.kind, options.op)
    ]
    if options.json:
        print_json(
            [
                {**impl.as_dict(), "plugin": owner, "available": not reason, "reason": reason}
                for impl, owner, reason in rows
            ]
        )
        return 0
    print_table(
        (
            "kind",
            "name",
            "plugin",
            "priority",
            "devices",
            "dtypes",
            f"on {options.device} {options.dtype}",
        ),
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
    return 0


def why(options: Namespace) -> int:
    """Which implementation is chosen for a request, and why each other one is not."""
    try:
        resolution = resolve(
            options.kind,
            options.op,
            name=options.name,
            device=options.device,
            dtype=options.dtype,
            features=options.feature,
            capability=options.capability,
        )
    except ImplUnavailable as error:
        if not options.json:
            raise
        request = {"kind": options.kind, "implements": options.op}
        print_json({**request, "chosen": None, "error": str(error)})
        return 2
    if options.json:
        print_json(resolution.as_dict())
    else:
        _print_resolution(resolution)
    return 0


def doctor(options: Namespace) -> int:
    """Import every target and every command; print tracebacks; exit code 1 on a failure."""
    report = examine(ensure_plugins())
    if options.json:
        print_json(report.as_dict())
    else:
        for problem in report.problems:
            print(f"{problem.what}: {problem.error}\n{problem.traceback}")
        for name, reason in report.skipped.items():
            print(f"{name}: not imported, {reason}")
        print(f"{report.num_imported} targets imported, {len(report.problems)} problems")
    return 1 if report.problems else 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="k3 plugins", description="What the plugins offer and why.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run: object) -> ArgumentParser:
        text = run.__doc__
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--json", action="store_true", help="print one JSON document")
        command.set_defaults(run=run)
        return command

    add("list", list_plugins)
    impls = add("impls", list_impls)
    impls.add_argument("--kind", choices=KINDS, metavar="KIND", help="only this kind")
    impls.add_argument("--op", help="only this op or interface")
    asked = add("why", why)
    asked.add_argument("kind", help="attention, kernel, ...")
    asked.add_argument("op", help="kda, situ_glu, ...")
    asked.add_argument("--name", help="ask for this implementation")
    asked.add_argument("--feature", action="append", default=[], help="a feature it must have")
    for command in (impls, asked):
        command.add_argument("--device", default="cpu", help="cpu, cuda, cuda:0, ...")
        command.add_argument("--dtype", default="float32", help="float64, float32, bfloat16, ...")
        command.add_argument("--capability", type=_capability, help="of the CUDA device, as 9.0")
    add("doctor", doctor)
    return parser


def _request(impl: Impl, options: Namespace) -> Request:
    return Request(
        kind=impl.kind,
        implements=impl.implements,
        device=options.device,
        dtype=options.dtype,
        capability=options.capability,
    )


def _print_resolution(resolution: Resolution) -> None:
    request, chosen = resolution.request, resolution.chosen
    wanted = ", ".join([request.device, request.dtype, *sorted(request.features)])
    print(f"{request.kind} {request.implements} for {wanted}")
    print(f"chosen: {chosen.name} by {resolution.source} ({chosen.summary or 'no summary'})")
    print(f"target: {chosen.target}")
    if resolution.rejected:
        rows = [(impl.name, reason) for impl, reason in resolution.rejected]
        print_table(("rejected", "reason"), rows)
    else:
        print("no other candidates")


def _capability(text: str) -> tuple[int, int]:
    major, dot, minor = text.partition(".")
    if not (dot and major.isdecimal() and minor.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not MAJOR.MINOR, such as 9.0")
    return int(major), int(minor)
