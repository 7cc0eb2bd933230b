"""attn_res by Triton: the whole mix in one pass. T tokens, D model width."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from k3_kernels.attn_res import cpu
from k3_kernels.attn_res.kernel import attn_res_kernel
from k3_kernels.launch import check_floats, needs_grad

MAX_SOURCES = 16
"""Above it the kernel's unrolled loop grows without need; K3 has at most 9 sources."""

MAX_REGISTERS = 128
"""Two programs of 8 warps fit a multiprocessor; 128 suffices without spills at D = 7168."""


def attn_res(values: Sequence[Tensor], norm_D: Tensor, proj_1D: Tensor, *, eps: float) -> Tensor:
    """Softmax over the sources of proj . RMSNorm(v_i), applied to the un-normalised v_i.

    As `attn_res.reference`. The form in plain torch serves calls that need gradients or have more
    than `MAX_SOURCES` sources (full, not block, residuals).
    """
    if not 1 <= len(values) <= MAX_SOURCES or needs_grad(*values, norm_D, proj_1D):
        return cpu.attn_res(values, norm_D, proj_1D, eps=eps)
    check_values("attn_res", values, norm_D, proj_1D)
    out_TD = torch.empty(values[-1].shape, dtype=values[-1].dtype, device=values[-1].device)
    mix(values, norm_D, proj_1D, out_TD, eps)
    return out_TD


def mix(
    values: Sequence[Tensor],
    norm_D: Tensor,
    proj_1D: Tensor,
    out_TD: Tensor,
    eps: float,
    added_TD: Tensor | None = None,
    sum_TD: Tensor | None = None,
    out_norm_D: Tensor | None = None,
    out_eps: float = 0.0,
) -> None:
    """Fills `out`; with `added` the last source is their sum, which is stored in `sum`, and with
    `out_norm` the mix is normed."""
    num_tokens, width = out_TD.shape
    if not out_TD.numel():
        return
    attn_res_kernel[(num_tokens,)](
        tuple(aligned(value) for value in values),
        norm_D.contiguous(),
        proj_1D.contiguous(),
        out_TD,
        out_TD if added_TD is None else aligned(added_TD),
        out_TD if sum_TD is None else sum_TD,
        out_TD if out_norm_D is None else out_norm_D.contiguous(),
        eps,
        out_eps,
        D=width,
        DPAD=triton.next_power_of_2(width),
        NUM_SOURCES=len(values),
        HAS_ADDED=added_TD is not None,
        HAS_NORM=out_norm_D is not None,
        num_warps=row_warps(width),
        maxnreg=MAX_REGISTERS,
    )


def aligned(value_TD: Tensor) -> Tensor:
    """Contiguous and on a 16-byte boundary, which the kernel's wide loads rely on."""
    value_TD = value_TD.contiguous()
    return value_TD if value_TD.data_ptr() % 16 == 0 else value_TD.clone()


def row_warps(width: int) -> int:
    """Warps of a program that holds one row: about 32 values a thread."""
    return max(1, min(16, triton.next_power_of_2(width) // 1024))


def check_values(op: str, values: Sequence[Tensor], norm_D: Tensor, proj_1D: Tensor) -> None:
    """Raise for sources of different shapes, or a norm and query that do not fit them."""
    shapes = {tuple(value.shape) for value in values}
    width = values[0].shape[-1]
    if len(shapes) > 1 or values[0].dim() != 2 or {norm_D.numel(), proj_1D.numel()} != {width}:
        raise ValueError(
            f"{op}: the sources have shapes {sorted(shapes)}, norm {tuple(norm_D.shape)} and proj "
            f"{tuple(proj_1D.shape)}; all sources must be [T, D], norm [D] and proj [1, D]"
        )
    check_floats(op, norm=norm_D, proj=proj_1D, **{f"source {i}": v for i, v in enumerate(values)})
