"""Tensors of one shape as matrices for kernels that work element by element."""

from __future__ import annotations

from torch import Tensor


def as_rows(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Matrices whose rows are contiguous; one long row where all are contiguous, of which the last
    tile alone may be partly empty."""
    rows = tuple(_rows(x) for x in tensors)
    if all(x.is_contiguous() for x in rows):
        return tuple(x.view(1, -1) for x in rows)
    return rows


def _rows(x: Tensor) -> Tensor:
    """`x` as a matrix whose rows are contiguous; a copy only when no view is."""
    rows = x.reshape(-1, x.shape[-1]) if x.dim() else x.reshape(1, 1)
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()
