"""`k3 kernels list`: the answer of the registry for each op."""

from __future__ import annotations

from k3_core.cli.table import print_json, print_table
from k3_core.errors import ImplUnavailable
from k3_core.ops import OP_NAMES
from k3_core.plugins import Resolution, resolve


def show(device: str, dtype: str, *, as_json: bool) -> int:
    """Print the choice of every op; exit code 1 when one has none."""
    answers = {op: answer(op, device, dtype) for op in OP_NAMES}
    if as_json:
        print_json([as_dict(op, found) for op, found in answers.items()])
    else:
        print(f"kernels for {device}, {dtype}")
        print_table(
            ("op", "chosen", "by", "not chosen", "reason"),
            [row for op, found in answers.items() for row in rows(op, found)],
        )
    return 1 if any(isinstance(found, ImplUnavailable) for found in answers.values()) else 0


def answer(op: str, device: str, dtype: str) -> Resolution | ImplUnavailable:
    """What a model would get for an op, or why it would get nothing."""
    try:
        return resolve("kernel", op, device=device, dtype=dtype)
    except ImplUnavailable as error:
        return error


def as_dict(op: str, found: Resolution | ImplUnavailable) -> object:
    """An answer as JSON values."""
    if isinstance(found, Resolution):
        return found.as_dict()
    return {"kind": "kernel", "implements": op, "chosen": None, "error": str(found)}


def rows(op: str, found: Resolution | ImplUnavailable) -> list[tuple[str, str, str, str, str]]:
    """Lines of the table: the choice with the first rejected candidate, then the other ones."""
    if isinstance(found, ImplUnavailable):
        return [(op, "none", "", "", str(found).splitlines()[0])]
    rejected = [(impl.name, reason) for impl, reason in found.rejected] or [("", "")]
    first, *rest = rejected
    lines = [(op, found.chosen.name, found.source, *first)]
    return [*lines, *(("", "", "", *one) for one in rest)]
