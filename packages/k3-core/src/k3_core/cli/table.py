"""Aligned plain-text tables and JSON for the commands that must start fast (no rich)."""

import json
from collections.abc import Sequence


def print_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print rows below a header, columns aligned to the left."""
    lines = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    for line in lines:
        cells = (f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True))
        print("  ".join(cells).rstrip())


def print_json(value: object) -> None:
    """Print one JSON document."""
    print(json.dumps(value, indent=2))
