"""`k3 kernels bench`: the table of times, ratios and errors, and its JSON file."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import torch

from k3_core.errors import K3Error
from k3_kernels.bench.cases import bench_cases
from k3_kernels.bench.run import Row, bench
from k3_kernels.cli.machine import describe

BUDGET = 0.4
"""Seconds that one call with all its implementations is timed for."""

HEADER = (
    f"{'op':<21}{'call':<16}{'implementation':<31}{'pass':<10}{'ms':>9}{'ratio':>8}{'error':>10}"
)


def measure(device: str, dtype: str, *, op: str | None, out: Path | None) -> None:
    """Print one row a call and implementation as it is measured, and write them all to `out`."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise K3Error(f"--device {device}: torch finds no CUDA device here; use --device cpu")
    machine = describe(device)
    print(", ".join(f"{key} {value}" for key, value in machine.items() if value is not None))
    print(f"{dtype}; ratio: time of the reference over this one's; error: against float64")
    print(f"*: what a model gets here\n\n{HEADER}")
    rows: list[Row] = []
    for case in bench_cases(device.partition(":")[0], op):
        for row in bench(case, device, getattr(torch, dtype), BUDGET):
            rows.append(row)
            print(line(row), flush=True)
    if out is not None:
        date = datetime.now(UTC).isoformat(timespec="seconds")
        record = {"date": date, "dtype": dtype, "machine": machine, "rows": [*map(asdict, rows)]}
        out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def line(row: Row) -> str:
    """One row of the table."""
    name = row.impl + " *" * row.is_chosen
    kind = "both" if row.has_backward else "forward"
    return (
        f"{row.op:<21}{row.case:<16}{name:<31}{kind:<10}"
        f"{1e3 * row.seconds:>9.3f}{row.ratio:>8.2f}{row.error:>10.1e}"
    )
