"""`k3 kernels`: what this machine would use, how fast it is, and what launches fit it best."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from k3_core.errors import K3Error, nearest
from k3_core.ops import OP_NAMES
from k3_core.ops.declare import FLOATS

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    no_args_is_help=True,
    help="What the ops run on this machine, and how fast.",
)

Device = Annotated[str, typer.Option(help="cpu or cuda; default: cuda where there is one.")]
Dtype = Annotated[str, typer.Option(help="Of the activations; default: float32, on cuda bfloat16.")]
Op = Annotated[str, typer.Option(help="Only this op.")]


@app.command("list")
def list_(
    device: Device = "",
    dtype: Dtype = "",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """What each op would run here, who decided, and why nothing else is used."""
    from k3_kernels.cli.listing import show

    raise typer.Exit(show(*_where(device, dtype), as_json=json))


@app.command()
def bench(
    device: Device = "",
    dtype: Dtype = "",
    op: Op = "",
    out: Annotated[Path | None, typer.Option(help="Write the figures to this JSON file.")] = None,
) -> None:
    """Time every implementation that can run here against the references, in the same run."""
    from k3_kernels.cli.timing import measure

    measure(*_where(device, dtype), op=_known(op), out=out)


@app.command()
def tune(op: Op = "") -> None:
    """Time the launch configurations of the Triton kernels on this GPU and keep the fastest."""
    from k3_kernels.cli.tuner import tune_ops

    tune_ops(_known(op))


def _where(device: str, dtype: str) -> tuple[str, str]:
    """Device and dtype, with what is left out filled in."""
    import torch

    has_cuda = torch.cuda.is_available()
    device = device or ("cuda" if has_cuda else "cpu")
    if device.partition(":")[0] not in ("cpu", "cuda"):
        raise K3Error(f"--device {device!r} is not known; use cpu or cuda")
    is_cuda = device.startswith("cuda")
    dtype = dtype or ("bfloat16" if is_cuda else "float32")
    if dtype not in FLOATS:
        raise K3Error(f"--dtype {dtype!r} is not known; use {', '.join(sorted(FLOATS))}")
    return device, dtype


def _known(op: str) -> str | None:
    """The op, or None for all of them; raises K3Error for one that does not exist."""
    if op and op not in OP_NAMES:
        near = nearest(op, OP_NAMES)
        hint = f"did you mean {near!r}?" if near else f"there are: {', '.join(OP_NAMES)}"
        raise K3Error(f"no op {op!r}; {hint}")
    return op or None
