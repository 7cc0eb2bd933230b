"""attn_res by Triton: the whole mix in one pass. T tokens, D model width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from k3_kernels.attn_res import cpu
from k3_kernels.attn_res.backward import mix_backward
from k3_kernels.attn_res.kernel import attn_res_kernel
from k3_kernels.attn_res.whole import whole_mix_kernel
from k3_kernels.early import MAX_ROWS, early_launch
from k3_kernels.launch import aligned, check_floats, needs_grad
from k3_kernels.once import refuse_second_derivative

MAX_SOURCES = 16
"""Above it the kernel's unrolled loop grows without need; K3 has at most 9 sources."""

MAX_WHOLE = 8192
"""Values that a program of few tokens holds at once."""
MAX_REGISTERS = 128
"""Two programs of 8 warps fit a multiprocessor; 128 suffices without spills at D = 7168."""


def attn_res(values: Sequence[Tensor], norm_D: Tensor, proj_1D: Tensor, *, eps: float) -> Tensor:
    """Softmax over the sources of proj . RMSNorm(v_i), applied to the un-normalised v_i.

    As `attn_res.reference`. The form in plain torch serves sources of different dtypes and more
    than `MAX_SOURCES` of them (full, not block, residuals).
    """
    if not fits(values):
        return cpu.attn_res(values, norm_D, proj_1D, eps=eps)
    check_values("attn_res", values, norm_D, proj_1D)
    if needs_grad(*values, norm_D, proj_1D):
        return Mix.apply(eps, 0.0, None, norm_D, proj_1D, None, *values)[0]
    out_TD = torch.empty(values[-1].shape, dtype=values[-1].dtype, device=values[-1].device)
    mix(values, norm_D, proj_1D, out_TD, eps)
    return out_TD


def fits(values: Sequence[Tensor]) -> bool:
    """Whether the kernels take these sources."""
    return 1 <= len(values) <= MAX_SOURCES and len({value.dtype for value in values}) == 1


class Mix(torch.autograd.Function):
    """attn_res, and depth_read with an output norm and `added`; keeps 2 n + 1 numbers a token."""

    @staticmethod
    def forward(
        ctx: Any,
        eps: float,
        out_eps: float,
        added_TD: Tensor | None,
        norm_D: Tensor,
        proj_1D: Tensor,
        out_norm_D: Tensor | None,
        *values: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """(the mix, normed where there is a norm; the sum where there is something to add)."""
        ctx.set_materialize_grads(False)
        last_TD = values[-1]
        out_TD = torch.empty(last_TD.shape, dtype=last_TD.dtype, device=last_TD.device)
        sum_TD = None if added_TD is None else torch.empty_like(out_TD)
        num_saved = 2 * len(values) + 1
        saved = torch.empty(len(out_TD), num_saved, dtype=torch.float32, device=out_TD.device)
        out = out_norm_D, out_eps, saved
        mix(values, norm_D, proj_1D, out_TD, eps, added_TD, sum_TD, *out)
        ctx.out_eps = out_eps
        read = (*values[:-1], last_TD if sum_TD is None else sum_TD)
        ctx.save_for_backward(norm_D, proj_1D, out_norm_D, saved, *read)
        return out_TD, sum_TD

    @staticmethod
    def backward(
        ctx: Any, d_out_TD: Tensor | None, d_sum_TD: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Gradients of `added` and the last source are one tensor, that of their sum."""
        refuse_second_derivative("attn_res")
        norm_D, proj_1D, out_norm_D, saved, *values = ctx.saved_tensors
        _, _, needs_added, needs_norm, needs_proj, needs_out_norm, *needs = ctx.needs_input_grad
        if d_out_TD is None:
            d_out_TD = torch.zeros_like(values[-1])
        needs_last = needs[-1]
        needs[-1] = needs_last or needs_added
        d = mix_backward(
            values,
            norm_D,
            proj_1D,
            out_norm_D,
            saved,
            d_out_TD,
            d_sum_TD,
            ctx.out_eps,
            (*needs, needs_norm, needs_proj),
        )
        d_last_TD = d.values[-1]
        return (
            None,
            None,
            d_last_TD if needs_added else None,
            d.norm_D,
            d.proj_1D,
            d.out_norm_D if needs_out_norm else None,
            *d.values[:-1],
            d_last_TD if needs_last else None,
        )


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
    saved: Tensor | None = None,
) -> None:
    """Fills `out`; with `added` the last source is their sum, which is stored in `sum`, and with
    `out_norm` the mix is normed. saved [T, 2 n + 1]: filled with what the backward needs."""
    num_tokens, width = out_TD.shape
    if not out_TD.numel():
        return
    tensors = (
        tuple(aligned(value) for value in values),
        norm_D.contiguous(),
        proj_1D.contiguous(),
        out_TD,
        out_TD if added_TD is None else aligned(added_TD),
        out_TD if sum_TD is None else sum_TD,
        out_TD if out_norm_D is None else out_norm_D.contiguous(),
    )
    num_padded = triton.next_power_of_2(len(values))
    if saved is None and num_tokens <= MAX_ROWS and num_padded * width <= MAX_WHOLE:
        whole_mix_kernel[(num_tokens,)](
            *tensors,
            eps,
            out_eps,
            D=width,
            DPAD=triton.next_power_of_2(width),
            NUM_SOURCES=len(values),
            NPAD=num_padded,
            HAS_ADDED=added_TD is not None,
            HAS_NORM=out_norm_D is not None,
            **early_launch(num_tokens, out_TD.device),
            num_warps=max(1, min(4, width // 256)),
        )
        return
    attn_res_kernel[(num_tokens,)](
        *tensors,
        out_TD if saved is None else saved,
        eps,
        out_eps,
        D=width,
        DPAD=triton.next_power_of_2(width),
        NUM_SOURCES=len(values),
        HAS_ADDED=added_TD is not None,
        HAS_NORM=out_norm_D is not None,
        HAS_SAVED=saved is not None,
        **early_launch(num_tokens, out_TD.device),
        num_warps=row_warps(width),
        maxnreg=MAX_REGISTERS,
    )


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
