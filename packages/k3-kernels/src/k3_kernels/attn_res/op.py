"""attn_res by Triton: the whole mix in one pass. T tokens, D model width."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from k3_core.custom_op import Gradients, Needs, custom_op
from k3_kernels.attn_res import cpu
from k3_kernels.attn_res.backward import mix_backward
from k3_kernels.attn_res.kernel import attn_res_kernel
from k3_kernels.attn_res.whole import whole_mix_kernel
from k3_kernels.early import MAX_ROWS, early_launch
from k3_kernels.launch import aligned, check_floats

MAX_SOURCES = 16
"""Above it the kernel's unrolled loop grows without need; K3 has at most 9 sources."""

MAX_WHOLE = 8192
"""Values that a program of few tokens holds at once."""
MAX_REGISTERS = 128
"""Two programs of 8 warps fit a multiprocessor; 128 suffices without spills at D = 7168."""


def attn_res(values: Sequence[Tensor], norm_D: Tensor, proj_1D: Tensor, *, eps: float) -> Tensor:
    """Softmax over the sources of proj . RMSNorm(v_i), applied to the un-normalised v_i.

    As `attn_res.reference`. Sources of another dtype than the last one's, which the result has,
    are converted to it. The form in plain torch serves more than `MAX_SOURCES` of them (full, not
    block, residuals).
    """
    if not fits(values):
        return cpu.attn_res(values, norm_D, proj_1D, eps=eps)
    check_values("attn_res", values, norm_D, proj_1D)
    values = of_one_dtype(values)
    return _attn_res(values, norm_D, proj_1D, eps=eps)


def fits(values: Sequence[Tensor]) -> bool:
    """Whether the kernels take these sources."""
    return 1 <= len(values) <= MAX_SOURCES


def of_one_dtype(values: Sequence[Tensor]) -> Sequence[Tensor]:
    """The sources in the dtype of the last one.

    Under autocast the embeddings are float32, and what layers add to them is not.
    """
    dtype = values[-1].dtype
    if all(value.dtype == dtype for value in values):
        return values
    return [value.to(dtype) for value in values]


def new_saved(values: Sequence[Tensor]) -> Tensor:
    """Memory for what the kernel keeps of a token: 2 n + 1 numbers."""
    shape = len(values[0]), 2 * len(values) + 1
    return values[0].new_empty(shape, dtype=torch.float32)


def _saved(needs: Needs, values: Sequence[Tensor], **_: object) -> tuple[Tensor]:
    return (new_saved(values),)


def _forward(
    needs: Needs, values: Sequence[Tensor], norm_D: Tensor, proj_1D: Tensor, eps: float
) -> tuple[Tensor, tuple[Tensor]]:
    out_TD, saved = values[-1].new_empty(values[-1].shape), new_saved(values)
    mix(values, norm_D, proj_1D, out_TD, eps, saved=saved)
    return out_TD, (saved,)


def _backward(
    grads: Sequence[Tensor],
    saved: Sequence[Tensor],
    needs: Needs,
    values: Sequence[Tensor],
    norm_D: Tensor,
    proj_1D: Tensor,
) -> Gradients:
    wanted = (*needs["values"], needs["norm_D"], needs["proj_1D"])
    d = mix_backward(values, norm_D, proj_1D, None, saved[0], grads[0], None, 0.0, wanted)
    return d._asdict()


@custom_op("attn_res.triton", forward=_forward, backward=_backward, saved=_saved)
def _attn_res(values: Sequence[Tensor], norm_D: Tensor, proj_1D: Tensor, *, eps: float) -> Tensor:
    out_TD = values[-1].new_empty(values[-1].shape)
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
    # Of one source triton 3.6 does not compile it: its pass over layouts fails.
    is_whole = len(values) > 1 and num_tokens <= MAX_ROWS and num_padded * width <= MAX_WHOLE
    if saved is None and is_whole:
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
